"""Power of texts that differ: a test's chance to find each of them, exactly or quickly."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from cameraready.lm.watermark_power.theory.tails import matched_tail, poisson_binomial_tail


class Units:
    """What contexts are averaged over: the texts that they come from, or, where these are not known, the contexts themselves.

    Parameters
    ----------
    n : int
        Number of contexts.
    texts : array (n,), optional
        Which text each belongs to.
    """

    def __init__(self, n: int, texts: np.ndarray | None) -> None:
        self.n, self.texts = n, None
        if texts is not None:
            texts = np.asarray(texts)
            if texts.shape != (n,):
                raise ValueError(f"texts must name a text for each of {n} contexts, got shape {texts.shape}")
            self.texts = np.unique(texts, return_inverse=True)[1]

    def __len__(self) -> int:
        return self.n if self.texts is None else int(self.texts.max()) + 1

    def means(self, values: np.ndarray) -> np.ndarray:
        """Means of the texts, or the values of the contexts where they are the units."""
        if self.texts is None:
            return values
        return np.bincount(self.texts, values) / np.bincount(self.texts)

    def found(self, rate: np.ndarray, length: int, count: int, *, exact: bool) -> np.ndarray:
        """The chance of `count` green tokens among `length`, by text; one number where contexts count as drawn independently.

        Parameters
        ----------
        rate : array (n,)
            Chance that the token of each context is green.
        exact : bool
            Poisson-binomial, O(texts * length^2), up to 2,000 tokens; otherwise through its moments, O(n), within 3e-3.
        """
        if self.texts is None:
            return np.atleast_1d(stats.binom.sf(count - 1, length, rate.mean()))
        sizes = np.bincount(self.texts)
        mean = np.bincount(self.texts, rate) / sizes
        within = np.maximum(np.bincount(self.texts, rate**2) / sizes - mean**2, 0.0)
        target = _means_at_length(mean, within, sizes, length)
        if not exact or length > 2_000:
            spread = target * (1 - target) - np.minimum(within, target * (1 - target) * 0.999)
            return matched_tail(length * target, length * np.maximum(spread, 1e-12), count)
        positions = np.stack([_stretched(rate[self.texts == text], length) for text in range(len(sizes))])
        positions = np.clip(positions + (target - positions.mean(axis=1))[:, None], 0.0, 1.0)
        return poisson_binomial_tail(positions, count)

    def resampled(self, rate: np.ndarray, length: int, count: int, draws: np.ndarray) -> tuple[float, np.ndarray]:
        """Power, and that of each resample; `draws` (resamples, units) holds the units' weights."""
        if self.texts is None:
            found = stats.binom.sf(count - 1, length, [rate.mean(), *(draws @ rate)])
            return float(found[0]), found[1:]
        each = self.found(rate, length, count, exact=False)
        return float(each.mean()), draws @ each


def normal_power(mean: float, share: float, alpha: float, length: int) -> float:
    """Power by the normal law, with a threshold by the normal law (the paper's formula)."""
    gap = math.sqrt(length) * (mean - share) - stats.norm.isf(alpha) * math.sqrt(share * (1 - share))
    return float(stats.norm.cdf(gap / math.sqrt(max(mean * (1 - mean), 1e-300))))


def _means_at_length(mean: np.ndarray, within: np.ndarray, sizes: np.ndarray, length: int) -> np.ndarray:
    """Means of texts of another length than those seen: what varies within a text averages out as 1 / length."""
    if len(mean) < 2:
        return mean
    seen = mean.var(ddof=1)
    inside = within.mean()
    size = 1 / (1 / sizes).mean()
    between = max(seen - inside / size, 0.0)
    if seen <= 0 or length == size:
        return mean
    scale = math.sqrt((between + inside / length) / max(between + inside / size, 1e-300))
    return np.clip(mean.mean() + scale * (mean - mean.mean()), 0.0, 1.0)


def _stretched(rates: np.ndarray, length: int) -> np.ndarray:
    """`length` positions with the distribution of `rates`: themselves, or evenly spaced quantiles."""
    if len(rates) == length:
        return rates
    ordered = np.sort(rates)
    return ordered[((np.arange(length) + 0.5) * len(ordered) / length).astype(int)]
