"""The public side of a run: thresholds as functions of step and movement, shares of the budget, and what each step releases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from cameraready.optim.dp_c4.accounting import Release
from cameraready.optim.dp_c4.sampling import Sampling


@runtime_checkable
class ThresholdSchedule(Protocol):
    """Anything with these two methods is a schedule. What they use must be public: never a gradient, a loss or a clipped fraction."""

    def __call__(self, step: int, movement: float) -> float:
        """The threshold of step 0, 1, ..., the parameters being `movement` away from the snapshot (0.0 in the other modes)."""
        ...

    def at_anchor(self) -> float:
        """The threshold where gradients themselves are clipped: at the first step of snapshot mode, and wherever it starts anew."""
        ...


@dataclass(frozen=True)
class ConstantThreshold:
    """The same threshold at every step.

    Parameters
    ----------
    value : float
        Above 0.
    """

    value: float

    def __post_init__(self) -> None:
        _positive("value", self.value)

    def __call__(self, step: int, movement: float = 0.0) -> float:
        return self.value

    def at_anchor(self) -> float:
        return self.value


@dataclass(frozen=True)
class GeometricThreshold:
    """``max(start * decay ** step, floor)``.

    Parameters
    ----------
    start : float
        Above 0.
    decay : float
        Above 0, at most 1.
    floor : float
        Below it the threshold does not fall. Without a floor all thresholds together are at most ``start / (1 - decay)``: where the gradient of
        a sample at the optimum is longer than that, its reference never catches up, and the parameters drift for ever.
    """

    start: float
    decay: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        _positive("start", self.start)
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must be above 0 and at most 1, got {self.decay}")
        _not_negative("floor", self.floor)

    def __call__(self, step: int, movement: float = 0.0) -> float:
        return max(self.start * self.decay**step, self.floor)

    def at_anchor(self) -> float:
        return self.start


@dataclass(frozen=True)
class PolynomialThreshold:
    """``max(start / (1 + step) ** power, floor)``.

    Parameters
    ----------
    start : float
        Above 0.
    power : float
        At least 0; up to 1 the thresholds' sum has no bound.
    floor : float
        At least 0.
    """

    start: float
    power: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _positive("start", self.start)
        _not_negative("power", self.power)
        _not_negative("floor", self.floor)

    def __call__(self, step: int, movement: float = 0.0) -> float:
        return max(self.start / (1.0 + step) ** self.power, self.floor)

    def at_anchor(self) -> float:
        return self.start


@dataclass(frozen=True)
class MovementThreshold:
    """``min(cap, max(floor, smoothness * movement))``: how much a gradient may change over the way from the snapshot. For snapshot mode.

    Parameters
    ----------
    smoothness : float
        A bound on the Lipschitz constant of one sample's gradient that is known without the data: for logistic regression on rows
        of norm at most R it is R^2 / 4. Too small a value brings clipping bias back; privacy does not depend on it.
    anchor : float
        The threshold for gradients themselves, above 0.
    cap : float
        No threshold is larger.
    floor : float
        No threshold is smaller.
    """

    smoothness: float
    anchor: float
    cap: float = math.inf
    floor: float = 0.0

    def __post_init__(self) -> None:
        _positive("smoothness", self.smoothness)
        _positive("anchor", self.anchor)
        _not_negative("floor", self.floor)
        if not self.cap > 0.0:
            raise ValueError(f"cap must be above 0, got {self.cap}")

    def __call__(self, step: int, movement: float = 0.0) -> float:
        return min(self.cap, max(self.floor, self.smoothness * movement))

    def at_anchor(self) -> float:
        return self.anchor


@dataclass(frozen=True)
class StepPlan:
    """What each step of a run releases, from public quantities alone.

    Parameters
    ----------
    mode, sampling, schedule, shares, snapshot_every, restart_every, anchor_share
        As in `C4Optimizer`.
    """

    mode: Literal["snapshot", "table", "off"]
    sampling: Sampling
    schedule: ThresholdSchedule
    shares: tuple[float, ...] | None = None
    snapshot_every: int = 1
    restart_every: int | None = None
    anchor_share: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("snapshot", "table", "off"):
            raise ValueError(f"mode must be 'snapshot', 'table' or 'off', got {self.mode!r}")
        if self.snapshot_every < 1 or (self.restart_every is not None and self.restart_every < 1):
            raise ValueError("snapshot_every and restart_every must be at least 1")
        if not 0.0 < self.anchor_share < math.inf:
            raise ValueError(f"anchor_share must be a finite number above 0, got {self.anchor_share}")
        if self.shares is not None and not all(0.0 < share < math.inf for share in self.shares):
            raise ValueError("shares must be finite and above 0")
        if self.mode == "snapshot" and self.sampling.kind == "cyclic":
            raise ValueError(
                "snapshot mode takes Poisson samples or all records; fixed parts in turn are for table mode"
            )

    def kind(self, since_restart: int) -> str:
        """``"gradient"``, ``"coupled"``, ``"anchor"`` or ``"difference"``."""
        if self.mode != "snapshot":
            return "gradient" if self.mode == "off" else "coupled"
        due = self.restart_every is not None and since_restart >= self.restart_every
        return "anchor" if due or since_restart == 0 else "difference"

    def threshold(self, kind: str, step: int, movement: float) -> float:
        """The threshold of a step.

        Raises
        ------
        ValueError
            If the schedule gives a number that is negative or not finite.
        """
        value = float(self.schedule.at_anchor() if kind == "anchor" else self.schedule(step, movement))
        if not 0.0 <= value < math.inf:
            raise ValueError(
                f"the schedule gave the threshold {value} at step {step}; it must be finite and at least 0"
            )
        return value

    def release(self, step: int, kind: str, noise: float, threshold: float, part: int) -> Release:
        """The entry of the log for a step whose optimizer has the noise multiplier `noise`."""
        share = 1.0 if self.shares is None else self.shares[step]
        noise = float(noise) * share * (self.anchor_share if kind == "anchor" else 1.0)
        if self.sampling.kind == "poisson" and self.mode != "table":
            return Release(step, kind, noise, threshold, "poisson", rate=self.sampling.drawn_rate)
        if self.sampling.kind == "cyclic":
            return Release(step, kind, noise, threshold, "cyclic", part=part, parts=self.sampling.parts)
        return Release(step, kind, noise, threshold, "full")

    def releases(self, noise: float, steps: int) -> list[Release]:
        """The log of a run of `steps` steps from the start, but for the thresholds; what calibration needs."""
        every = self.restart_every or steps
        kinds = ["anchor" if self.mode == "snapshot" and step % every == 0 else "planned" for step in range(steps)]
        return [self.release(step, kind, noise, 1.0, step % self.sampling.parts) for step, kind in enumerate(kinds)]

    def begins_with(self, made: Sequence[Release], noise: float, steps: int | None) -> bool:
        """Whether releases are, but for their thresholds, the first of a run of `steps` steps with this noise."""

        def cost(release: Release) -> tuple[Any, ...]:
            return release.noise_multiplier, release.participation, release.rate, release.part, release.parts

        planned = self.releases(noise, len(made) if steps is None else steps)
        return [cost(release) for release in made] == [cost(release) for release in planned[: len(made)]]


def noise_shares(thresholds: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    r"""Relative noise multipliers that waste the least of a budget on steps whose noise is small anyway.

    Minimises the error :math:`\sum_t w_t \sigma_t^2 \tau_t^2` under a budget :math:`\sum_t 1 / (2 \sigma_t^2) = \rho`:
    :math:`\sigma_t^2 \propto 1 / (\tau_t \sqrt{w_t})`.

    Parameters
    ----------
    thresholds : sequence of float, length T
        tau_t, above 0 and known before the run.
    weights : sequence of float, length T, optional
        w_t, above 0: how much the noise of step t counts in the end; by default 1, which is right for table mode, where all noise stays.

    Returns
    -------
    list of float, length T
        Multipliers up to a common factor, scaled so that :math:`\sum_t 1 / \sigma_t^2 = T`, the budget of T equal ones.

    Raises
    ------
    ValueError
        If lengths differ or a number is not above 0.
    """
    weights = [1.0] * len(thresholds) if weights is None else list(weights)
    if len(weights) != len(thresholds) or not len(thresholds):
        raise ValueError(
            f"expected as many weights as thresholds, at least one, got {len(weights)} and {len(thresholds)}"
        )
    if not all(0.0 < value < math.inf for value in (*thresholds, *weights)):
        raise ValueError("thresholds and weights must be finite and above 0")
    inverse = [tau * math.sqrt(weight) for tau, weight in zip(thresholds, weights, strict=True)]
    scale = math.fsum(inverse) / len(inverse)
    return [math.sqrt(scale / value) for value in inverse]


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def _not_negative(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
