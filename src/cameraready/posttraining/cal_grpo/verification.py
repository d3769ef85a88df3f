"""Verification@K from stored trajectories, with errors that know that trajectories of one prompt go together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from cameraready.posttraining.cal_grpo.attempts import attempts_of


@dataclass(frozen=True)
class VerificationRate:
    """V@k: the share of trajectories solved by attempt ``k``, and what prompts say about its error.

    ``success`` is the rate at attempt k once it is reached (p_k, prompts pooled; NaN if nobody reached it), ``reach`` the share of
    trajectories that got there.
    """

    k: int
    value: float
    standard_error: float
    low: float
    high: float
    success: float
    reach: float
    prompts: int
    trajectories: int


def verification_at_k(
    rewards: Any,
    reached: Any = None,
    ks: Sequence[int] | None = None,
    *,
    group_ids: Any,
    confidence: float = 0.95,
    interval: Literal["t", "bootstrap"] = "t",
    seed: int | np.random.Generator = 0,
) -> list[VerificationRate]:
    """The probability of success by attempt k, sequential and with the failures in context.

    Each prompt counts alike: the mean over prompts of its trajectories' rate. Trajectories of a prompt are not independent draws of a
    success, so the standard error is that of the prompts' rates (clustered by prompt). This is not pass@k of independent samples, and the
    unbiased estimator of that one does not apply. (Ildiz et al., 2026, arXiv:2604.17912; intervals ours.)

    Parameters
    ----------
    rewards, reached
        (T, K), as for `attempt_advantages`. A trajectory that was cut off counts as unsolved.
    ks : sequence of int, optional
        Numbers of attempts, from 1 to K; all by default.
    group_ids : (T,)
        The prompt of each trajectory.
    confidence : float
    interval : {"t", "bootstrap"}
        Student's t over prompts, kept within [0, 1], or the BCa bootstrap of prompts. Where all prompts have the same rate both have
        no width, and the exact (Clopper-Pearson) interval of that many prompts, each solved with this rate, stands in.
    seed : int or numpy Generator
        For the bootstrap.

    Returns
    -------
    list of VerificationRate
        One for each of ``ks``. Standard error and interval are NaN with a single prompt.

    Raises
    ------
    ValueError
        As for `attempt_advantages`; a k out of range; no trajectory.
    """
    table = attempts_of(rewards, reached, group_ids)
    made, attempts = table.shape
    wanted = list(range(1, attempts + 1)) if ks is None else [int(k) for k in ks]
    if not all(1 <= k <= attempts for k in wanted):
        raise ValueError(f"ks must be from 1 to {attempts}, the attempts in rewards, got {wanted}")
    if interval not in ("t", "bootstrap"):
        raise ValueError(f"interval must be 't' or 'bootstrap', got {interval!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if not made:
        raise ValueError("there are no trajectories")
    size = np.bincount(table.group)
    prompts = len(size)
    if prompts == 1:
        warnings.warn("one prompt says nothing about others: its V@k has no standard error", UserWarning, stacklevel=2)
    generator = np.random.default_rng(seed)
    found = []
    for k in wanted:
        solved = table.success[:, :k].any(axis=1)
        rates = np.bincount(table.group, weights=solved) / size
        error = float(rates.std(ddof=1) / np.sqrt(prompts)) if prompts > 1 else float("nan")
        low, high = _interval(rates, error, confidence, interval, generator)
        n, c = table.reached[:, k - 1].sum(), table.success[:, k - 1].sum()
        found.append(
            VerificationRate(
                k,
                float(rates.mean()),
                error,
                low,
                high,
                float(c / n) if n else float("nan"),
                float(n / made),
                prompts,
                made,
            )
        )
    return found


def _interval(
    rates: np.ndarray, error: float, confidence: float, interval: str, generator: np.random.Generator
) -> tuple[float, float]:
    prompts, mean = len(rates), float(rates.mean())
    if prompts == 1:
        return float("nan"), float("nan")
    if error < 1e-12:
        solved, rest = mean * prompts, (1 - confidence) / 2
        low = float(stats.beta.ppf(rest, solved, prompts - solved + 1)) if solved > 0 else 0.0
        high = float(stats.beta.isf(rest, solved + 1, prompts - solved)) if solved < prompts else 1.0
        return low, high
    if interval == "bootstrap":
        bounds = stats.bootstrap((rates,), np.mean, confidence_level=confidence, rng=generator).confidence_interval
        return float(bounds.low), float(bounds.high)
    half = error * float(stats.t.ppf((1 + confidence) / 2, prompts - 1))
    return max(0.0, mean - half), min(1.0, mean + half)
