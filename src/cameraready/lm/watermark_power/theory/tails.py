"""Exact thresholds and powers of a test that counts green tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special, stats


def number(name: str, value: Any) -> float:
    """`value` as a float, or a TypeError that names it."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_alpha(alpha: float) -> None:
    """Raises ValueError unless ``0 < alpha < 1``."""
    if not 0.0 < number("alpha", alpha) < 1.0:
        raise ValueError(f"alpha, the false-positive rate, must lie strictly between 0 and 1, got {alpha!r}")


def check_length(length: int) -> int:
    """`length` as an int of at least 1, or ValueError."""
    if not (number("length", length).is_integer() and length >= 1):
        raise ValueError(f"length, the number of distinct scored n-grams, must be a whole number >= 1, got {length!r}")
    return int(length)


def threshold_count(alpha: float, length: int, gamma: float) -> int:
    """The smallest k with ``P(Bin(length, gamma) >= k) <= alpha``; ``length + 1`` where not even all green is significant.

    Parameters
    ----------
    alpha : float
        False-positive rate of one text, in (0, 1).
    length : int
        Number of scored tokens, >= 1.
    gamma : float
        Share of green tokens, in (0, 1): what the vocabulary really gives, ``floor(gamma * V) / V``.
    """
    check_alpha(alpha)
    length = check_length(length)
    k = int(stats.binom.isf(alpha, length, gamma)) + 1
    # isf solves in floating point: step to the exact neighbour.
    while k > 0 and stats.binom.sf(k - 2, length, gamma) <= alpha:
        k -= 1
    while k <= length and stats.binom.sf(k - 1, length, gamma) > alpha:
        k += 1
    return k


def normal_threshold(alpha: float, length: int, gamma: float) -> int:
    """The smallest count whose z-score exceeds the normal quantile of `alpha`, at most ``length + 1``; its size is not `alpha`."""
    check_alpha(alpha)
    bar = gamma * length + stats.norm.isf(alpha) * math.sqrt(length * gamma * (1 - gamma))
    return min(math.floor(bar) + 1, length + 1)


def size(count: int, length: int, gamma: float) -> float:
    """The exact false-positive rate of "at least `count` of `length` tokens are green"."""
    return float(stats.binom.sf(count - 1, length, gamma))


def poisson_binomial_tail(rates: np.ndarray, count: int) -> np.ndarray:
    """``P(sum of independent Bernoulli(rates) >= count)`` for each row: (n, length) -> (n,). Exact, O(n length^2) time.

    The recursion adds positive terms alone, so that it loses no digits.
    """
    rates = np.atleast_2d(np.asarray(rates, dtype=float))
    n, length = rates.shape
    if count <= 0:
        return np.ones(n)
    if count > length:
        return np.zeros(n)
    # mass[:, i] is the probability of i successes so far, those of `count` or more kept together in the last column.
    mass = np.zeros((n, count + 1))
    mass[:, 0] = 1.0
    for rate in rates.T:
        moved = mass[:, :-1] * rate[:, None]
        mass[:, :-1] -= moved
        mass[:, 1:] += moved
    return np.clip(mass[:, -1], 0.0, 1.0)


def matched_tail(mean: np.ndarray, variance: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """`poisson_binomial_tail` from the first two moments of the sum, through the binomial that has them; within about 3e-3.

    `mean` and `variance` (equal shapes), with ``0 < variance <= mean``; `count` broadcasts. O(1) a value.
    """
    mean, variance = np.asarray(mean, dtype=float), np.asarray(variance, dtype=float)
    count = np.asarray(count, dtype=float)
    share = np.clip(1.0 - variance / np.maximum(mean, 1e-300), 1e-12, 1 - 1e-12)
    trials = mean / share
    # The binomial's tail as an incomplete beta function, which continues it to trials that are no whole number.
    beyond = np.maximum(trials - count + 1.0, 1e-300)
    tail = special.betainc(np.maximum(count, 1e-300), beyond, share)
    return np.where(count <= 0, 1.0, np.where(count > trials + 0.5, 0.0, tail))
