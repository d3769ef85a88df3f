"""The study's arms: every way of tracking a level is called as ``track(x)`` -> predictions and alarms.

`x` (n,) has noise of standard deviation 1. A prediction is made from earlier samples only. Arms that are told more (the
horizon, the number of changes, the changes themselves, the whole series) take it from a `Knowledge`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np

from cameraready.stats.atc import atc


@dataclass(frozen=True)
class Track:
    """Predictions float64 (n,), the first NaN; positions of alarms and of the changes that they stand for, int64 (k,)."""

    prediction: np.ndarray
    alarms: np.ndarray
    changes: np.ndarray


@dataclass(frozen=True)
class Knowledge:
    """What informed arms are told: positions of the true changes, and series of the same kind (k, n) with levels to tune on."""

    changes: Sequence[int] = ()
    practice: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    level: np.ndarray = field(default_factory=lambda: np.empty(0))


Tracker = Callable[[np.ndarray, Knowledge], Track]
_NONE = np.empty(0, dtype=np.int64)


def own(**options: Any) -> Tracker:
    def track(x: np.ndarray, known: Knowledge) -> Track:
        result = atc(x, **options)
        return Track(result.prediction, result.alarms, result.changes)

    return track


def restarted_constant(alpha: float = 0.05) -> Tracker:
    """The constant threshold of the official code's comparison, sqrt(2 log(2 T^2 / ((S+1) alpha))), restarted S times by the clock."""

    def track(x: np.ndarray, known: Knowledge) -> Track:
        segments = len(known.changes) + 1
        threshold = math.sqrt(2 * math.log(2 * len(x) ** 2 / (segments * alpha)))
        edges = [*range(0, len(x), max(len(x) // segments, 1)), len(x)]
        parts = [atc(x[a:b], threshold=threshold) for a, b in itertools.pairwise(edges)]
        prediction = np.concatenate([part.prediction for part in parts])
        begun = np.array(edges[1:-1], dtype=int)
        prediction[begun] = x[begun - 1]
        alarms, changes = (
            np.concatenate([getattr(part, name) + a for part, a in zip(parts, edges, strict=False)])
            for name in ("alarms", "changes")
        )
        return Track(prediction, alarms, changes)

    return track


# --- compiled: what no library has in a form that predicts -------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def tracked_cusum(x: np.ndarray, reference: float, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Page's two-sided CUSUM (1954, Biometrika 41) around the running mean of the current segment.

    `reference` is half the jump it is made for, `limit` its threshold, both in standard deviations. After an alarm the segment
    begins where the sum last left zero, so that all samples since are kept. Returns predictions and alarms, (n,) each.
    """
    n = len(x)
    prediction, alarm = np.full(n, np.nan), np.zeros(n, dtype=np.bool_)
    sums = np.zeros(n + 1)
    start, up, down, up_from, down_from = 0, 0.0, 0.0, 0, 0
    for t in range(n):
        if t > start:
            mean = (sums[t] - sums[start]) / (t - start)
            prediction[t] = mean
            up, down = up + x[t] - mean - reference, down - x[t] + mean - reference
            if up <= 0.0:
                up, up_from = 0.0, t + 1
            if down <= 0.0:
                down, down_from = 0.0, t + 1
        sums[t + 1] = sums[t] + x[t]
        if up > limit or down > limit:
            alarm[t] = True
            start = min(up_from if up > limit else down_from, t)
            up, down, up_from, down_from = 0.0, 0.0, t + 1, t + 1
    return prediction, alarm


@numba.njit(cache=True, nogil=True)
def frozen_cusum(x: np.ndarray, n_reference: int, reference: float, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """The textbook's: a reference mean from `n_reference` samples, never tracked, estimated anew after an alarm."""
    n = len(x)
    prediction, alarm = np.full(n, np.nan), np.zeros(n, dtype=np.bool_)
    held, total, up, down = 0, 0.0, 0.0, 0.0
    for t in range(n):
        if held:
            prediction[t] = total / held
        elif t:
            prediction[t] = x[t - 1]
        if held < n_reference:
            held, total = held + 1, total + x[t]
            continue
        deviation = x[t] - total / held
        up, down = max(0.0, up + deviation - reference), max(0.0, down - deviation - reference)
        if up > limit or down > limit:
            alarm[t] = True
            held, total, up, down = 1, x[t], 0.0, 0.0
    return prediction, alarm


@numba.njit(cache=True, nogil=True)
def bayesian_online(x: np.ndarray, hazard: float, prior_std: float, n_kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Adams and MacKay, 2007, arXiv:0710.3742, for normal samples of variance 1 with an unknown mean.

    The mean's prior is normal around the first sample with standard deviation `prior_std`. Of the run lengths the `n_kept`
    most probable are kept. Returns the predictive means, and alarms where the most probable run length falls, (n,) each.
    """
    n = len(x)
    prediction, alarm = np.full(n, np.nan), np.zeros(n, dtype=np.bool_)
    weight, mean, precision, length = (
        np.zeros(n_kept + 1),
        np.zeros(n_kept + 1),
        np.zeros(n_kept + 1),
        np.zeros(n_kept + 1),
    )
    kept, centre, prior = 1, x[0], 1.0 / prior_std**2
    weight[0], mean[0], precision[0] = 1.0, (prior * centre + x[0]) / (prior + 1.0), prior + 1.0
    length[0], longest = 1.0, 1.0
    for t in range(1, n):
        fresh = 0.0
        prediction[t] = hazard * centre
        for i in range(kept):
            prediction[t] += (1.0 - hazard) * weight[i] * mean[i]
        total = 0.0
        for i in range(kept):
            variance = 1.0 + 1.0 / precision[i]
            fresh += weight[i] * hazard
            weight[i] *= (1.0 - hazard) * math.exp(-0.5 * (x[t] - mean[i]) ** 2 / variance) / math.sqrt(variance)
            mean[i] = (mean[i] * precision[i] + x[t]) / (precision[i] + 1.0)
            precision[i] += 1.0
            length[i] += 1.0
            total += weight[i]
        variance = 1.0 + prior_std**2
        weight[kept] = fresh * math.exp(-0.5 * (x[t] - centre) ** 2 / variance) / math.sqrt(variance)
        mean[kept], precision[kept], length[kept] = (prior * centre + x[t]) / (prior + 1.0), prior + 1.0, 1.0
        total += weight[kept]
        kept += 1
        if total <= 0.0:  # a sample that no run explains: begin anew with it
            weight[0], mean[0], precision[0], length[0] = 1.0, x[t], prior + 1.0, 1.0
            kept, total = 1, 1.0
        best = 0
        for i in range(kept):
            weight[i] /= total
            if weight[i] > weight[best]:
                best = i
        alarm[t] = length[best] < longest
        longest = length[best]
        if kept > n_kept:
            least = 0
            for i in range(kept):
                if weight[i] < weight[least]:
                    least = i
            for i in range(least, kept - 1):
                weight[i], mean[i], precision[i], length[i] = (
                    weight[i + 1],
                    mean[i + 1],
                    precision[i + 1],
                    length[i + 1],
                )
            kept -= 1
    return prediction, alarm


# --- passive: they forget all the time --------------------------------------------------------------------------------


def sliding(width: int | None = None) -> Tracker:
    """Mean of the last `width` samples; by default the official code's 0.5 sqrt(T log(T) / S), which knows T and S."""

    def track(x: np.ndarray, known: Knowledge) -> Track:
        n = len(x)
        w = width or max(1, round(0.5 * math.sqrt(n * math.log(n) / max(len(known.changes), 1))))
        sums = np.concatenate([[0.0], np.cumsum(x - x[0])])
        ends = np.arange(n)
        starts = np.maximum(ends - w, 0)
        with np.errstate(invalid="ignore"):
            prediction = x[0] + (sums[ends] - sums[starts]) / (ends - starts)
        return Track(prediction, _NONE, _NONE)

    return track


def discounted(factor: float | None = None) -> Tracker:
    """Exponentially weighted mean, normalised; by default with 1 - sqrt(S/T), which knows T and S."""

    def track(x: np.ndarray, known: Knowledge) -> Track:
        from scipy.signal import lfilter

        g = factor or 1 - math.sqrt(max(len(known.changes), 1) / len(x))
        total, weight = lfilter([1.0], [1.0, -g], x - x[0]), lfilter([1.0], [1.0, -g], np.ones(len(x)))
        return Track(np.r_[np.nan, x[0] + (total / weight)[:-1]], _NONE, _NONE)

    return track


# --- active: they detect and restart ----------------------------------------------------------------------------------


def adwin(x: np.ndarray, known: Knowledge) -> Track:
    """river's ADWIN with its defaults; its own estimate of the mean."""
    from river.drift import ADWIN

    detector, prediction, alarms = ADWIN(), np.full(len(x), np.nan), []
    for t, value in enumerate(x.tolist()):
        if t:
            prediction[t] = detector.estimation
        detector.update(value)
        if detector.drift_detected:
            alarms.append(t)
    return Track(prediction, np.array(alarms, dtype=np.int64), np.array(alarms, dtype=np.int64))


def page_hinkley(x: np.ndarray, known: Knowledge) -> Track:
    """river's Page-Hinkley with its defaults; the mean since its last alarm."""
    from river.drift import PageHinkley

    detector, prediction, alarms = PageHinkley(), np.full(len(x), np.nan), []
    total, held = 0.0, 0
    for t, value in enumerate(x.tolist()):
        if held:
            prediction[t] = total / held
        detector.update(value)
        if detector.drift_detected:
            alarms.append(t)
            total, held = 0.0, 0
        total, held = total + value, held + 1
    return Track(prediction, np.array(alarms, dtype=np.int64), np.array(alarms, dtype=np.int64))


def _alarmed(found: tuple[np.ndarray, np.ndarray]) -> Track:
    alarms = np.flatnonzero(found[1])
    return Track(found[0], alarms, alarms)


def frozen(x: np.ndarray, known: Knowledge) -> Track:
    """The textbook's CUSUM: reference mean from 50 samples, k = 0.5, h = 5."""
    return _alarmed(frozen_cusum(x, 50, 0.5, 5.0))


def tuned_cusum(x: np.ndarray, known: Knowledge) -> Track:
    """Tracked CUSUM with the k and h that had the lowest regret on other series of the same kind; untuned 0.5 and 8 without any."""
    best = (0.5, 8.0)
    if len(known.practice):
        grid = [(k, h) for k in (0.25, 0.5, 0.75, 1.0) for h in (4.0, 6.0, 8.0, 10.0, 14.0)]
        best = min(grid, key=lambda kh: sum(regret(tracked_cusum(y, *kh)[0], known.level) for y in known.practice))
    return _alarmed(tracked_cusum(x, *best))


def bayesian(hazard: float | None = None) -> Tracker:
    """Bayesian online change-point detection; by default with the true rate of changes, (S+1)/T."""

    def track(x: np.ndarray, known: Knowledge) -> Track:
        return _alarmed(bayesian_online(x, hazard or (len(known.changes) + 1) / len(x), 5.0, 200))

    return track


# --- ceilings ---------------------------------------------------------------------------------------------------------


def oracle(x: np.ndarray, known: Knowledge) -> Track:
    """The mean since the last true change; at a change itself it has nothing better than the mean before."""
    sums = np.concatenate([[0.0], np.cumsum(x)])
    t = np.arange(len(x))
    edges = np.array([0, *known.changes])
    start = edges[np.maximum(np.searchsorted(edges, t - 1, side="right") - 1, 0)]
    with np.errstate(invalid="ignore", divide="ignore"):
        prediction = (sums[t] - sums[start]) / (t - start)
    changes = np.array(known.changes, dtype=np.int64)
    return Track(prediction, changes, changes)


def pelt(x: np.ndarray, known: Knowledge) -> Track:
    """ruptures' PELT with the whole series at hand, penalty 2 log(n); "predictions" are its segments' means: no forecast at all."""
    import ruptures

    search = ruptures.KernelCPD(kernel="linear", min_size=2).fit(
        x[:, None]
    )  # the C version of PELT for a jump of the mean
    ends = search.predict(pen=2.0 * math.log(len(x)))
    edges = [0, *ends]
    means = np.concatenate([np.full(b - a, x[a:b].mean()) for a, b in itertools.pairwise(edges)])
    changes = np.array(ends[:-1], dtype=np.int64)
    return Track(means, changes, changes)


def regret(prediction: np.ndarray, level: np.ndarray) -> float:
    """Sum over all samples but the first of the squared distance of prediction and level, in units of the noise's variance."""
    return float(((prediction[1:] - level[1:]) ** 2).sum())


PASSIVE = ("window-50", "window-tuned", "discount-98", "discount-tuned")
UNINFORMED_PASSIVE = ("window-50", "discount-98")
#: What a user can run without being told the horizon, the changes or what to tune on.
DEPLOYABLE = ("window-50", "discount-98", "adwin", "page-hinkley", "bocpd")

TRACKERS: dict[str, Tracker] = {
    "atc": own(),
    "atc-geometric": own(scan="geometric"),
    "atc-mad": own(sigma="mad"),
    "constant-3": own(threshold=3.0),
    "constant-6": own(threshold=6.0),
    "constant-12": own(threshold=12.0),
    "clocked-constant": restarted_constant(),
    "window-50": sliding(50),
    "window-tuned": sliding(),
    "discount-98": discounted(0.98),
    "discount-tuned": discounted(),
    "adwin": adwin,
    "page-hinkley": page_hinkley,
    "bocpd": bayesian(1 / 250),
    "bocpd-tuned": bayesian(),
    "cusum-tuned": tuned_cusum,
    "cusum-frozen": frozen,
    "oracle": oracle,
    "pelt": pelt,
}
