"""Pair labels of Rank-Learner and the objectives that a scorer is fitted with.

Arno, Frauen, Javurek, Demeester and Feuerriegel, 2026, arXiv:2602.03517. A pair's loss is binary cross-entropy of
sigmoid(g(x) - g(x')) against a label. The loss is affine in the label, so labels outside [0, 1] are legal, and their expectation is
what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from scipy.special import expit

#: How pairs are labelled; see `PairLabels`.
Labels = Literal["orthogonal", "clipped", "plug-in"]
LABELS = get_args(Labels)


@dataclass(frozen=True)
class PairLabels:
    """The label of every ordered pair of rows, computed when asked for; no n x n table is ever held.

    Parameters
    ----------
    effects : float array (n,)
        Estimated effects, tau_hat(x).
    corrections : float array (n,)
        AIPW score minus estimated effect, phi - tau_hat; has mean zero given x where either nuisance is right.
    kappa : float
        Width of the soft comparison, in the unit of the effects; positive.
    kind : {"orthogonal", "clipped", "plug-in"}
        ``"orthogonal"``: t + w (r - r') with t = sigmoid((tau - tau') / kappa), w = t (1 - t) / kappa and r the correction (Theorem
        5.1). ``"clipped"``: the same cut to [0, 1], as in the authors' code; biased where corrections are large. ``"plug-in"``: t
        alone, whose bias is of first order in the nuisances' error.
    """

    effects: np.ndarray
    corrections: np.ndarray
    kappa: float
    kind: Labels = "orthogonal"

    def __len__(self) -> int:
        return len(self.effects)

    def of(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Labels of the pairs (first, second), index arrays that broadcast against each other."""
        soft = expit((self.effects[first] - self.effects[second]) / self.kappa)
        if self.kind == "plug-in":
            return soft
        weight = soft * (1.0 - soft) / self.kappa
        label = soft + weight * (self.corrections[first] - self.corrections[second])
        return np.clip(label, 0.0, 1.0) if self.kind == "clipped" else label

    def totals(self, rows: np.ndarray) -> np.ndarray:
        """Sum over all rows j of the labels of (i, j), a row's own label of 1/2 included; same shape as `rows`."""
        if self.kind == "clipped":
            return self.of(rows[:, None], rows[None, :]).sum(axis=1)
        soft, ones = win_chances(self.effects[rows] / self.kappa), np.ones(len(rows))
        if self.kind == "plug-in":
            return soft @ ones
        weight = soft * (1.0 - soft)
        corrections = self.corrections[rows] / self.kappa
        return soft @ ones + corrections * (weight @ ones) - weight @ corrections

    def taken(self, rows: np.ndarray) -> PairLabels:
        """The labels among some of the rows."""
        return PairLabels(self.effects[rows], self.corrections[rows], self.kappa, self.kind)


def automatic_kappa(effects: np.ndarray, corrections: np.ndarray) -> float:
    """A width that moves with the unit of the outcome: half the spread of the effects, more where labels are noisy.

    t (1 - t) <= 1/4, so that the noise of a label has a standard deviation of at most sqrt(2) sd(corrections) / (4 kappa);
    kappa is raised until this is at most 1. Without any spread the effects cannot be told apart, and every positive width is
    as good as another: 1 is returned.
    """
    width = max(0.5 * float(np.std(effects)), np.sqrt(2.0) / 4.0 * float(np.std(corrections)))
    scale = float(np.abs(effects).max() + np.abs(corrections).max())
    return width if width > 1e-12 * scale else 1.0


class Objective(Protocol):
    """What `network.minimise` needs: rows of a batch, and the slope of the batch's mean loss in the scores."""

    def batches(self, generator: np.random.Generator) -> list[np.ndarray]:
        """One epoch: index arrays into the rows."""

    def slope(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Derivative of the batch's mean loss by each score, same shape as `scores`."""


@dataclass(frozen=True)
class RowTargets:
    """Squared error, or logistic loss where `logistic`, of one target a row; for nuisances and for the DR-learner."""

    targets: np.ndarray
    batch: int = 64
    logistic: bool = False

    def batches(self, generator: np.random.Generator) -> list[np.ndarray]:
        return shuffled_batches(len(self.targets), self.batch, generator)

    def slope(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        predicted = expit(scores) if self.logistic else scores
        return (predicted - self.targets[rows]) / len(rows)


@dataclass(frozen=True)
class PairsOfBatch:
    """All pairs within each batch of shuffled rows: batch (batch - 1) / 2 pairs for `batch` forward passes."""

    labels: PairLabels
    batch: int = 64

    def batches(self, generator: np.random.Generator) -> list[np.ndarray]:
        return [rows for rows in shuffled_batches(len(self.labels), self.batch, generator) if len(rows) > 1]

    def slope(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        excess = win_chances(scores) @ np.ones(len(rows)) - self.labels.totals(
            rows
        )  # both hold 1/2 for a row against itself
        return 2.0 * excess / (len(rows) * (len(rows) - 1))


@dataclass(frozen=True)
class UniformPairs:
    """Ordered pairs drawn uniformly, `batch` at a time: the paper's stage 2.

    Attributes
    ----------
    share : float
        Pairs an epoch, as a share of all n (n - 1).
    pool : int array (m, 2), optional
        Draw from these pairs alone; for asking how many different pairs are enough.
    """

    labels: PairLabels
    batch: int = 128
    share: float = 0.1
    pool: np.ndarray | None = None

    def batches(self, generator: np.random.Generator) -> list[np.ndarray]:
        n = len(self.labels)
        count = max(1, int(self.share * np.ceil(n * (n - 1) / self.batch)))
        if self.pool is not None:
            picked = self.pool[generator.integers(len(self.pool), size=count * self.batch)]
            first, second = picked.T
        else:
            first = generator.integers(n, size=count * self.batch)
            second = (first + generator.integers(1, n, size=count * self.batch)) % n
        shape = (count, self.batch)
        return list(np.concatenate([first.reshape(shape), second.reshape(shape)], axis=1))

    def slope(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        half = len(rows) // 2
        excess = expit(scores[:half] - scores[half:]) - self.labels.of(rows[:half], rows[half:])
        return np.concatenate([excess, -excess]) / half


class WatchedPairs:
    """The pair loss on a fixed set of pairs, whose labels are computed once.

    Parameters
    ----------
    labels : PairLabels
    pairs : (int array (m,), int array (m,))
    """

    def __init__(self, labels: PairLabels, pairs: tuple[np.ndarray, np.ndarray]) -> None:
        self.first, self.second = pairs
        # The loss is affine in the labels, so their part is one inner product with the scores.
        wanted = labels.of(self.first, self.second)
        n = len(labels)
        self.pull = (np.bincount(self.first, wanted, n) - np.bincount(self.second, wanted, n)) / len(self.first)

    def __call__(self, scores: np.ndarray) -> float:
        """Mean loss over the pairs, for scores (n,)."""
        gap = scores[self.first] - scores[self.second]
        soft = np.maximum(gap, 0.0) + np.log1p(np.exp(-np.abs(gap)))
        return float(soft.mean() - self.pull @ scores)

    def with_slope(self, scores: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and its derivative by each score, (n,)."""
        gap = scores[self.first] - scores[self.second]
        small = np.exp(-np.abs(gap))
        value = (np.maximum(gap, 0.0) + np.log1p(small)).mean() - self.pull @ scores
        chance = np.where(gap > 0.0, 1.0, small) / (1.0 + small)
        n = len(scores)
        slope = np.bincount(self.first, chance, n) - np.bincount(self.second, chance, n)
        return float(value), slope / len(gap) - self.pull


def win_chances(scores: np.ndarray) -> np.ndarray:
    """sigmoid(s_i - s_j) of all pairs of a few rows, (n, n), from n exponentials: e^s_i / (e^s_i + e^s_j)."""
    middle = 0.5 * (scores.max() + scores.min())
    powers = np.exp(np.minimum(np.maximum(scores - middle, -300.0), 300.0))  # further apart is settled anyway
    sums = powers[:, None] + powers[None, :]
    return np.divide(powers[:, None], sums, out=sums)


def pair_loss(scores: np.ndarray, labels: PairLabels, chunk: int = 512) -> float:
    """Mean loss over all pairs of rows, O(n^2) time and O(n chunk) memory."""
    n, total = len(scores), 0.0
    columns = np.arange(n)[None, :]
    for start in range(0, n, chunk):
        rows = np.arange(start, min(start + chunk, n))[:, None]
        gap = scores[rows] - scores[columns]
        terms = np.logaddexp(0.0, gap) - labels.of(rows, columns) * gap
        total += float(terms.sum()) - len(rows) * np.log(2.0)  # the diagonal's own terms
    return total / (n * (n - 1))


def shuffled_batches(n: int, size: int, generator: np.random.Generator) -> list[np.ndarray]:
    """A random order of n rows cut into batches of nearly equal length, at most `size` each."""
    return np.array_split(generator.permutation(n), -(-n // size))
