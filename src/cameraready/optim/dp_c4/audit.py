"""An audit of a private training procedure by membership inference in one run: a lower bound of epsilon to hold against the claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes
    ----------
    epsilon_lower : float
        With the given confidence the procedure's epsilon is at least this.
    claimed_epsilon, delta, confidence : float
    guesses, correct : int
        How often membership was guessed, and how often rightly.
    n_canaries : int
    """

    epsilon_lower: float
    claimed_epsilon: float
    delta: float
    confidence: float
    guesses: int
    correct: int
    n_canaries: int

    @property
    def refutes_claim(self) -> bool:
        """True where the claimed epsilon is refuted; False proves nothing, for an audit sees leaks, not their absence."""
        return self.epsilon_lower > self.claimed_epsilon

    def __str__(self) -> str:
        word = "refutes" if self.refutes_claim else "does not refute"
        return (
            f"membership guessed rightly {self.correct} times of {self.guesses}: epsilon at least {self.epsilon_lower:.3g} "
            f"(confidence {self.confidence:g}), which {word} the claimed {self.claimed_epsilon:g}"
        )


def audit_one_run(
    train: Callable[[Tensor], Tensor],
    n_canaries: int,
    *,
    claimed_epsilon: float,
    delta: float,
    generator: torch.Generator,
    guess_fraction: float = 0.5,
    confidence: float = 0.95,
) -> AuditReport:
    """Train once with about half of some canaries, guess from the result which, and bound epsilon from how often that was right.

    Parameters
    ----------
    train : callable
        ``train(included) -> scores``: `included` is a bool tensor of shape (n_canaries,), and tells which canaries belong to the training data of the
        run; `scores`, same shape, come from what the run publishes, and should be larger for canaries that took part (such as minus
        their loss). Everything but `included` must be fixed beforehand.
    n_canaries : int
        At least 10; a thousand bound epsilon up to about 5.
    claimed_epsilon, delta : float
        The claim, for neighbours by adding or removing a record.
    generator : torch.Generator
        Draws `included`.
    guess_fraction : float
        Share of the canaries that are guessed at: those with the highest and the lowest scores.
    confidence : float
        Chance that the bound holds.

    Returns
    -------
    AuditReport

    Raises
    ------
    ValueError
        If arguments are out of range, or scores are not finite or of another shape.

    Notes
    -----
    Use canaries that influence the result as much as the guarantee allows, such as rows with a feature of their own. Which
    score is used, and how many guesses, must not be chosen by looking at the outcome.

    References
    ----------
    Steinke, Nasr and Jagielski, 2023, arXiv:2305.08846, Theorem 5.2.
    """
    if n_canaries < 10 or not 0.0 < guess_fraction <= 1.0:
        raise ValueError(
            f"expected at least 10 canaries and a guess_fraction in (0, 1], got {n_canaries} and {guess_fraction}"
        )
    included = torch.rand(n_canaries, generator=generator) < 0.5
    scores = torch.as_tensor(train(included.clone())).detach().cpu().double()
    if scores.shape != (n_canaries,) or not torch.isfinite(scores).all():
        raise ValueError(f"train must give {n_canaries} finite scores, got shape {tuple(scores.shape)}")
    each = max(1, int(n_canaries * guess_fraction / 2.0))
    order = scores.argsort(stable=True)
    correct = int(included[order[-each:]].sum()) + int((~included[order[:each]]).sum())
    lower = epsilon_lower_bound(correct, 2 * each, n_canaries, delta, confidence=confidence)
    return AuditReport(lower, claimed_epsilon, delta, confidence, 2 * each, correct, n_canaries)


def epsilon_lower_bound(
    correct: int, guesses: int, n_canaries: int, delta: float, *, confidence: float = 0.95
) -> float:
    """The largest epsilon that so many right guesses refute, with the given confidence; 0 where they refute none.

    Parameters
    ----------
    correct, guesses, n_canaries : int
        ``0 <= correct <= guesses <= n_canaries``; each canary was included with probability one half.
    delta : float
    confidence : float

    Returns
    -------
    float

    References
    ----------
    Steinke, Nasr and Jagielski, 2023, arXiv:2305.08846, Theorem 5.2.
    """
    if not 0 <= correct <= guesses <= n_canaries:
        raise ValueError(f"expected 0 <= correct <= guesses <= n_canaries, got {correct}, {guesses} and {n_canaries}")
    if not 0.0 <= delta < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"delta and confidence must lie between 0 and 1, got {delta} and {confidence}")

    def refuted(epsilon: float) -> bool:
        return _p_value(correct, guesses, n_canaries, epsilon, delta) < 1.0 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2.0 * high
        if high > 64.0:
            return low
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _p_value(correct: int, guesses: int, n_canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the procedure is (epsilon, delta)-private."""
    right = 1.0 / (1.0 + np.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0.0 or correct == 0:
        return min(tail, 1.0)
    # The largest of P[correct - i <= W < correct] / i over i = 1 .. correct.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)) / np.arange(1, correct + 1)
    return min(tail + 2.0 * n_canaries * delta * float(below.max()), 1.0)
