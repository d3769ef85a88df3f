"""Whether chains agree: split R-hat and effective sample size of many quantities at once, WAIC, and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import logsumexp

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Diagnostics:
    """Whether the chains agree.

    Attributes
    ----------
    rhat, effective_size : DataFrames (n, n)
        Of each edge, split R-hat and effective number of draws.
    largest_rhat : float
        Of the edges whose probability is from 0.01 to 0.99, and of the log-likelihood.
    chain_gap : float
        Largest difference between two chains in the probability of an edge.
    acceptance : dict of str to float
        Share of accepted proposals by move; NaN for a move that is not made.
    waic : float
        Of whole traces, on the deviance scale (lower is better).
    converged : bool
        Whether no edge has both a chain gap above 0.2 and an R-hat above 1.1.
    """

    rhat: pd.DataFrame
    effective_size: pd.DataFrame
    largest_rhat: float
    chain_gap: float
    acceptance: dict[str, float]
    waic: float
    converged: bool


@dataclass(frozen=True)
class Calibration:
    """How often pairs given probability p are truly ordered: a table with one row a bin, and the expected error."""

    table: pd.DataFrame
    ece: float


def split_rhat(draws: np.ndarray) -> np.ndarray:
    """Potential scale reduction of split chains, (chains, draws, ...) -> (...) (Gelman et al., 2013, section 11.4).

    1 where a quantity is the same in all draws of all chains, infinity where it is constant in each but not across; NaN
    with fewer than four draws a chain.
    """
    half = draws.shape[1] // 2
    if half < 2:
        return np.full(draws.shape[2:], np.nan)
    parts = np.concatenate([draws[:, :half], draws[:, -half:]]).astype(float)
    within = parts.var(axis=1, ddof=1).mean(axis=0)
    between = parts.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rhat = np.sqrt((half - 1) / half + between / within)
    return np.where((within == 0) & (between == 0), 1.0, rhat)


def effective_size(draws: np.ndarray) -> np.ndarray:
    """Effective number of independent draws, (chains, draws, ...) -> (...), by Geyer's initial positive sequence.

    The number of draws where a quantity never changes.
    """
    chains, n = draws.shape[:2]
    flat = draws.reshape(chains, n, -1).astype(float)
    centred = flat - flat.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=2 * n, axis=1)
    autocovariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :n].mean(axis=0) / n
    within = autocovariance[0] * n / max(n - 1, 1)
    between = flat.mean(axis=1).var(axis=0, ddof=1) if chains > 1 else np.zeros(flat.shape[2])
    total = autocovariance[0] + between
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = 1 - (within - autocovariance) / total
    correlation[0] = 1.0
    pairs = correlation[0 : n - n % 2 : 2] + correlation[1 : n - n % 2 : 2]
    positive = np.minimum.accumulate(pairs > 0, axis=0)
    time = 2 * np.where(positive, np.minimum.accumulate(pairs, axis=0), 0.0).sum(axis=0) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(total > 0, chains * n / np.maximum(time, 1e-12), float(chains * n))
    return np.minimum(size, chains * n).reshape(draws.shape[2:])


def waic(log_likelihood: np.ndarray, count: np.ndarray) -> float:
    """Widely applicable information criterion on the deviance scale from (n_draws, n_traces), traces seen `count` times."""
    n_draws = len(log_likelihood)
    fit = logsumexp(log_likelihood, axis=0) - np.log(n_draws)
    penalty = log_likelihood.var(axis=0, ddof=1)
    return float(-2 * (count * (fit - penalty)).sum())


def calibration_table(probability: np.ndarray, happened: np.ndarray, n_bins: int) -> tuple[np.ndarray, float]:
    """Bins of predicted probability, and the expected calibration error.

    Returns
    -------
    table : float64 array (n_filled_bins, 4)
        Lower edge, mean prediction, observed share, number of cases.
    ece : float
        Mean over cases of |mean prediction - observed share| of their bin.
    """
    which = np.minimum((probability * n_bins).astype(int), n_bins - 1)
    rows, ece = [], 0.0
    for b in np.unique(which):
        mine = which == b
        predicted, observed = probability[mine].mean(), happened[mine].mean()
        rows.append((b / n_bins, predicted, observed, mine.sum()))
        ece += abs(predicted - observed) * mine.mean()
    return np.array(rows, dtype=float).reshape(-1, 4), float(ece)
