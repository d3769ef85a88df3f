"""How the samples that a direction takes grow with the dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.flows.mixed_cumulant._activation import activation
from cameraready.flows.mixed_cumulant.denoiser import loss_and_gradient, spherical_step
from cameraready.flows.mixed_cumulant.exponent import noise_levels
from cameraready.flows.mixed_cumulant.model import MixedCumulant, random_directions


class _Runs:
    """Runs in d dimensions, as `SphericalDenoiser` has them, that can be dropped one by one."""

    def __init__(
        self, model: MixedCumulant, d: int, runs: int, options: dict[str, Any], rng: np.random.Generator
    ) -> None:
        self.model, self.d, self.rng = model, d, rng
        self.phi = activation(options["phi"], trained=True)
        (self.a,), (self.s,) = noise_levels(options["snr"])
        self.gain, self.batch, self.rate = options["gain"], options["batch_size"], options["step_size"] / d
        self._start(runs)

    def _start(self, runs: int) -> None:
        self.directions = random_directions(self.d, self.rng, runs)
        w = self.rng.standard_normal((runs, self.d))
        self.w = w / np.linalg.norm(w, axis=1, keepdims=True)

    def step(self) -> None:
        x = self.model.sample((len(self.w), self.batch), self.directions, self.rng)
        eps = self.rng.standard_normal(x.shape)
        _, gradient = loss_and_gradient(self.w, x, eps, self.a, self.s, self.gain, self.phi)
        self.w = spherical_step(self.w, gradient, self.rate)

    def overlap(self, direction: int) -> np.ndarray:
        return np.abs(np.einsum("sd,sd->s", self.directions[:, direction], self.w))

    def keep(self, which: np.ndarray) -> None:
        self.w, self.directions = self.w[which], self.directions[which]


class _Overlaps(_Runs):
    """The same runs' overlaps (w.u, w.v) alone, at a cost that does not grow with d.

    Exact in law: the model and the start are invariant under rotations that keep u and v, so that the overlaps are a Markov chain. In the basis (u, v, rest of w) the
    gradient is computed as it is; in the other d - 3 directions the residual ``s N`` and the noisy sample ``N'`` are independent white Gaussians, so that the gradient there
    is white with variance ``(2 gain / B)^2 sum(s^2 phi^2 + q^2)`` and enters only by its squared length, a chi-square variable.
    """

    def _start(self, runs: int) -> None:
        w = self.rng.standard_normal((runs, self.d))
        self.w = (w / np.linalg.norm(w, axis=1, keepdims=True))[:, :2]

    def step(self) -> None:
        model, a, s, gain = self.model, self.a, self.s, self.gain
        shape = (len(self.w), self.batch)
        lam, nu = model.latents(shape, self.rng)
        x = self.rng.standard_normal((3, *shape))
        x[0] += math.sqrt(model.beta_u) * lam
        x[1] = (math.sqrt(model.beta_v) * nu + x[1]) / math.sqrt(1 + model.beta_v)
        eps = self.rng.standard_normal((3, *shape))
        rest = np.sqrt(np.maximum(1 - (self.w**2).sum(1), 0))
        w = np.stack([self.w[:, 0], self.w[:, 1], rest])[:, :, None]
        y, residual = a * x + s * eps, s**2 * x - a * s * eps
        p, along = (y * w).sum(0), (residual * w).sum(0)
        value = self.phi.function(p)
        pull = (along - gain * value) * self.phi.derivative(p)  # type: ignore[misc]
        factor = -2 * gain / self.batch
        w = w[:, :, 0]
        gradient = factor * ((value * residual + pull * y).sum(2) - gain * (value**2).sum(1) * w)
        gradient -= (gradient * w).sum(0) * w
        white = factor**2 * (s**2 * value**2 + pull**2).sum(1)
        length = white * self.rng.chisquare(self.d - 3, len(self.w)) if self.d > 3 else 0.0
        moved = w - self.rate * gradient
        self.w = (moved[:2] / np.sqrt((moved**2).sum(0) + self.rate**2 * length)).T

    def overlap(self, direction: int) -> np.ndarray:
        return np.abs(self.w[:, direction])

    def keep(self, which: np.ndarray) -> None:
        self.w = self.w[which]


def recovery_times(
    model: MixedCumulant,
    d: int,
    *,
    runs: int,
    direction: int = 0,
    threshold: float = 0.5,
    budget: int,
    random_state: int | np.random.Generator = 0,
    overlaps_only: bool = False,
    **options: Any,
) -> np.ndarray:
    """Samples until ``|w.direction|`` first reaches `threshold`, (runs,) float64; infinity where `budget` samples were not enough.

    Parameters
    ----------
    model : MixedCumulant
    d, runs, budget : int
    direction : {0, 1}
        u or v.
    threshold : float
    random_state : int or numpy.random.Generator
    overlaps_only : bool
        Simulate the overlaps alone: the same law at a cost that does not grow with d.
    **options
        ``phi``, ``gain``, ``snr``, ``step_size``, ``batch_size`` of `SphericalDenoiser`.
    """
    given = {"phi": "tanh", "gain": 0.5, "snr": 1.0, "step_size": 1.0, "batch_size": 64, **options}
    unknown = sorted(set(given) - {"phi", "gain", "snr", "step_size", "batch_size"})
    if unknown:
        raise TypeError(f"SphericalDenoiser has no {', '.join(unknown)}")
    if direction not in (0, 1) or not 0 < threshold < 1:
        raise ValueError(
            f"direction must be 0 (u) or 1 (v) and threshold between 0 and 1, got {direction!r} and {threshold!r}"
        )
    rng = np.random.default_rng(random_state) if isinstance(random_state, (int, np.integer)) else random_state
    process = (_Overlaps if overlaps_only else _Runs)(model, d, runs, given, rng)
    times, alive = np.full(runs, np.inf), np.arange(runs)
    for step in range(1, budget // given["batch_size"] + 1):
        process.step()
        reached = process.overlap(direction) >= threshold
        if reached.any():
            times[alive[reached]] = step * given["batch_size"]
            alive = alive[~reached]
            if not len(alive):
                break
            process.keep(~reached)
    return times


def kaplan_meier_median(times: np.ndarray, censored: np.ndarray | None = None) -> float:
    """Median of times of which some are only known to be longer, by Kaplan and Meier; infinity where half is not reached.

    Parameters
    ----------
    times : float array, (n,)
        Where `censored`, the time up to which there was no event.
    censored : bool array, (n,), optional
        None takes infinite times as censored at the end.
    """
    times = np.asarray(times, dtype=float)
    if times.ndim != 1 or not len(times) or np.isnan(times).any():
        raise ValueError("times must be a non-empty vector of numbers without NaN")
    censored = np.isinf(times) if censored is None else np.asarray(censored, dtype=bool)
    survival = 1.0
    for at in np.unique(times[~censored]):
        survival *= 1 - ((times == at) & ~censored).sum() / (times >= at).sum()
        if survival <= 0.5 + 1e-12:
            return float(at)
    return math.inf


@dataclass(frozen=True)
class SampleComplexity:
    """Samples against dimension, and the exponent of their growth.

    Attributes
    ----------
    dims : int array, (D,)
    times : float64 array, (D, runs)
        Samples to weak recovery; infinity where a run was stopped first (censored).
    medians : float64 array, (D,)
        Kaplan-Meier medians; infinity where fewer than half of the runs recovered.
    slope, low, high : float
        Least-squares slope of log median on log d and its bootstrap interval over runs; NaN, with `reason`, where a median is infinite. A resample in which one
        becomes infinite counts as an infinite slope.
    level : float
    budgets : int array, (D,)
    reason : str
    """

    dims: np.ndarray
    times: np.ndarray
    medians: np.ndarray
    slope: float
    low: float
    high: float
    level: float
    budgets: np.ndarray
    reason: str = ""

    @property
    def censored(self) -> np.ndarray:
        """Runs that did not recover, by dimension, (D,)."""
        return np.isinf(self.times).sum(1)

    def __str__(self) -> str:
        if self.reason:
            return f"no slope: {self.reason}"
        return f"samples grow as d^{self.slope:.2f} [{self.low:.2f}, {self.high:.2f}], {int(self.censored.sum())} of {self.times.size} runs censored"


def fitted_slope(dims: np.ndarray, medians: np.ndarray) -> np.ndarray:
    """Slope of log median on log d: (D,), (..., D) -> (...); infinite where a median is."""
    x = np.log(dims) - np.log(dims).mean()
    with np.errstate(invalid="ignore"):
        found = np.log(medians) @ x / (x @ x)
    return np.where(np.isinf(medians).any(-1), np.inf, found)


def sample_complexity_curve(
    dims: Sequence[int],
    *,
    model: MixedCumulant | None = None,
    direction: int = 0,
    threshold: float = 0.5,
    runs: int = 20,
    budget: Callable[[int], int] | None = None,
    step_size: float | Callable[[int], float] = 1.0,
    random_state: int = 0,
    overlaps_only: bool = False,
    resamples: int = 1_000,
    level: float = 0.95,
    **options: Any,
) -> SampleComplexity:
    """Samples to weak recovery over dimensions, with the exponent of their growth.

    Parameters
    ----------
    dims : sequence of int
        At least two different dimensions, each at least 3.
    model : MixedCumulant, optional
    direction : {0, 1}
        u or v.
    threshold : float
        Weak recovery: ``|w.direction|`` of at least this, the same for all d.
    runs : int
    budget : callable d -> int, optional
        Samples after which a run is given up (censored); default ``100 d log d`` for u, ``100 d^3`` for v.
    step_size : float or callable d -> float
        Theory wants a constant where the exponent is 2 and a multiple of 1 / d where it is 4: with larger ones normalisation undoes what the drift gains.
    random_state : int
    overlaps_only : bool
        Simulate the overlaps alone, exact in law, for large d.
    resamples, level
        Of the bootstrap over runs.
    **options
        ``phi``, ``gain``, ``snr``, ``batch_size`` of `SphericalDenoiser`.

    Returns
    -------
    SampleComplexity

    Raises
    ------
    ValueError
        Fewer than two dimensions, or an option out of range.
    """
    if len(set(dims)) < 2 or min(dims) < 3:
        raise ValueError(f"a slope needs two or more different dimensions of at least 3, got {list(dims)}")
    model = model or MixedCumulant()
    if budget is None:
        budget = (lambda d: int(100 * d * math.log(d))) if direction == 0 else (lambda d: 100 * d**3)
    sizes = np.array(sorted(set(dims)))
    seeds = np.random.SeedSequence(random_state).spawn(len(sizes) + 1)
    times = np.array(
        [
            recovery_times(
                model,
                int(d),
                runs=runs,
                direction=direction,
                threshold=threshold,
                budget=budget(int(d)),
                step_size=step_size(int(d)) if callable(step_size) else step_size,
                random_state=np.random.default_rng(seed),
                overlaps_only=overlaps_only,
                **options,
            )
            for d, seed in zip(sizes, seeds, strict=False)
        ]
    )
    budgets = np.array([budget(int(d)) for d in sizes])
    return summarised(sizes, times, budgets, np.random.default_rng(seeds[-1]), resamples, level)


def summarised(
    dims: np.ndarray,
    times: np.ndarray,
    budgets: np.ndarray,
    rng: np.random.Generator,
    resamples: int = 1_000,
    level: float = 0.95,
) -> SampleComplexity:
    """The slope of given times (D, runs), infinite where censored."""
    medians = np.array([kaplan_meier_median(row) for row in times])
    if np.isinf(medians).any():
        lost = ", ".join(str(d) for d in dims[np.isinf(medians)])
        reason = f"at d = {lost} fewer than half of the runs recovered within the budget"
        return SampleComplexity(dims, times, medians, math.nan, math.nan, math.nan, level, budgets, reason)
    runs = times.shape[1]
    chosen = rng.integers(runs, size=(resamples, len(dims), runs))
    drawn = np.take_along_axis(np.broadcast_to(times, (resamples, *times.shape)), chosen, axis=2)
    # Within a dimension all runs are censored at the same sample, where Kaplan-Meier's median is the lower sample median.
    slopes = fitted_slope(dims, np.sort(drawn, axis=2)[:, :, (runs - 1) // 2])
    low, high = np.quantile(slopes, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
    return SampleComplexity(
        dims, times, medians, float(fitted_slope(dims, medians)), float(low), float(high), level, budgets
    )
