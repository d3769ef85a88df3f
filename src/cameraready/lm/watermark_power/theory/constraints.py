"""What may be asked of a calibrator, and how one unknown is solved for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize

from cameraready.lm.watermark_power.theory.tails import check_length, normal_threshold, number, threshold_count

Test = Literal["exact", "normal"]


class Infeasible(ValueError):
    """No watermark meets the constraints; the sentence says how near one comes."""


#: Share of scored n-grams that is expected to survive where nobody says otherwise: one in twenty may be lost.
KEPT = 0.95


@dataclass(frozen=True)
class Bars:
    """What texts of several lengths must reach: the counts that mean "watermarked", when a share `kept` of the n-grams survives."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    kept: float = 1.0

    @classmethod
    def of(cls, test: Test, alpha: float, lengths: tuple[int, ...], share: float, kept: float = 1.0) -> Bars:
        """By the exact test or the normal law."""
        if not 0.0 < number("kept", kept) <= 1.0:
            raise ValueError(f"kept, the share of tokens that survive, must lie in (0, 1], got {kept!r}")
        return cls(lengths, tuple(threshold_of(test, alpha, length, share) for length in lengths), float(kept))


def lengths_around(length: int, shortest: int | None, most: int = 61) -> tuple[int, ...]:
    """Lengths from `shortest` to as far beyond `length`, at most 61 of them; a tenth less, and more, by default.

    Raises ValueError unless ``1 <= shortest <= length``.
    """
    length = check_length(length)
    shortest = max(1, math.ceil(0.9 * length)) if shortest is None else check_length(shortest)
    if shortest > length:
        raise ValueError(f"shortest must be at most length, got {shortest} and {length}")
    longest = 2 * length - shortest
    lengths = np.linspace(shortest, longest, min(most, longest - shortest + 1)).round().astype(int)
    return tuple(np.unique([*lengths, length]).tolist())


def default_gammas(alpha: float, shortest: int, kept: float) -> list[float]:
    """Shares from 0.05 to 0.98; where no edits are expected also the largest at which all-green text is significant, ``alpha^(1 / shortest)``."""
    grid = [round(0.05 * i, 2) for i in range(1, 19)] + [0.92, 0.94, 0.96, 0.98]
    largest = alpha ** (1 / shortest) * (1 - 1e-9)
    return sorted({*grid, largest} if kept == 1 and 0.01 < largest < 0.999 else set(grid))


def threshold_of(test: Test, alpha: float, length: int, share: float) -> int:
    """The count that means "watermarked", by the exact test or the normal law."""
    if test == "exact":
        return threshold_count(alpha, length, share)
    if test == "normal":
        return normal_threshold(alpha, length, share)
    raise ValueError(f"test must be 'exact' or 'normal', got {test!r}")


def solved(function: Callable[[float], float], upper_limit: float, *, upper: bool = True) -> float:
    """Where a growing function crosses zero, on the side where it is not negative (`upper`) or not positive."""
    if function(0.0) >= 0:
        return 0.0
    root = float(optimize.brentq(function, 0.0, upper_limit, xtol=1e-7))
    step = 1e-7
    while (function(root) < 0) if upper else (function(root) > 0):
        root = min(max(root + (step if upper else -step), 0.0), upper_limit)
        step *= 2
    return root


def check_power(power: float) -> None:
    """Raises ValueError unless ``0 < power < 1``."""
    if not 0.0 < number("power", power) < 1.0:
        raise ValueError(f"power must lie strictly between 0 and 1, got {power!r}")


def check_budget(max_kl: float) -> None:
    """Raises ValueError unless `max_kl` is finite and positive."""
    if not (math.isfinite(number("max_kl", max_kl)) and max_kl > 0):
        raise ValueError(f"max_kl, in nats a token, must be a finite number above 0, got {max_kl!r}")
