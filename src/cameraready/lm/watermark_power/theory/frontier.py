"""Which choices no other beats in both power and divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FrontierPoint:
    """A (gamma, delta) with its power and KL divergence, and the 95 % bootstrap interval of each."""

    gamma: float
    delta: float
    power: float
    power_low: float
    power_high: float
    kl: float
    kl_low: float
    kl_high: float

    @classmethod
    def of(
        cls, gamma: float, delta: float, power: float, powers: np.ndarray, kl: float, kls: np.ndarray
    ) -> FrontierPoint:
        """From the estimates and their resamples."""
        low, high = np.quantile(powers, [0.025, 0.975])
        kl_low, kl_high = np.quantile(kls, [0.025, 0.975])
        return cls(gamma, delta, float(power), float(low), float(high), float(kl), float(kl_low), float(kl_high))


def resamples(units: int, n: int, seed: int) -> np.ndarray:
    """Weights of the units in `n` bootstrap resamples, (n, units), each row summing to 1."""
    return np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=n) / units


def undominated(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Those than which no other has more power at no more divergence, by rising divergence. O(n log n)."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.kl, -p.power)):
        if not kept or point.power > kept[-1].power:
            kept.append(point)
    return kept
