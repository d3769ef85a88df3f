"""What a ranking is worth, and whether there is one: targeting operator characteristic, its area, policy value, a test.

Yadlowsky, Fleming, Shah, Brunskill and Wager, 2025, arXiv:2111.07966, define TOC and AUTOC; the finite-sample forms are those of
Arno et al., 2026, arXiv:2602.03517. `effects` may be known effects or doubly robust scores, whose conditional mean is the effect; `scores`
must not have been learnt from the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri
from sklearn.base import clone

from cameraready.causal.rank_learner.tables import n_rows, rows_of


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error; ``float(estimate)`` is the number."""

    value: float
    standard_error: float

    def __float__(self) -> float:
        return self.value

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Normal interval of the given coverage."""
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}")
        reach = float(ndtri(0.5 + level / 2.0)) * self.standard_error
        return self.value - reach, self.value + reach

    def __str__(self) -> str:
        value, low, high = (f"{float(f'{x:.3g}'):,g}" for x in (self.value, *self.interval()))
        return f"{value} [{low}, {high}]"


@dataclass(frozen=True)
class TocCurve:
    """TOC(q), the mean effect among the first share q less the mean effect of all.

    Attributes
    ----------
    shares, values, standard_errors : float arrays (m,)
    """

    shares: np.ndarray
    values: np.ndarray
    standard_errors: np.ndarray

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Pointwise limits (m,), (m,)."""
        reach = float(ndtri(0.5 + level / 2.0)) * self.standard_errors
        return self.values - reach, self.values + reach


def autoc(effects: Any, scores: Any) -> Estimate:
    """Area under the TOC curve: how much more the effect is among those ranked first, averaged over how many are treated.

    The mean over k = 1 .. n of the mean effect of the first k, less the mean effect of all. 0 for a random order. O(n log n).
    Rows of equal score share their places: the value is the mean over all orders among them.

    Parameters
    ----------
    effects : float array (n,)
        Known effects, or doubly robust scores; unit of the outcome.
    scores : float array (n,)
        The ranking, the largest first.

    Returns
    -------
    Estimate
        With the standard error of the delete-one jackknife, which covers the drawing of the rows, their ranks included, with
        the scoring function held fixed.

    Raises
    ------
    ValueError
        For arrays of different length, fewer than two rows, or values that are not finite.
    """
    effects, scores = _checked(effects, scores)
    order, groups = _order(scores)
    ranked = effects[order]
    means = np.cumsum(_shared(ranked, groups)) / np.arange(1, len(ranked) + 1)
    without = _autoc_without_each(ranked, groups, means)
    n = len(ranked)
    error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return Estimate(float(means.mean() - effects.mean()), float(error))


def toc_curve(effects: Any, scores: Any, shares: Sequence[float] | np.ndarray | None = None) -> TocCurve:
    """The TOC curve at given shares, with pointwise standard errors.

    Parameters
    ----------
    effects, scores : float arrays (n,)
        As in `autoc`.
    shares : sequence of float in (0, 1], optional
        By default 0.05, 0.10 .. 1. A share that is no whole number of rows takes a part of the last one, tied rows equally.

    Raises
    ------
    ValueError
        As in `autoc`, and for shares out of range.
    """
    effects, scores = _checked(effects, scores)
    q = np.linspace(0.05, 1.0, 20) if shares is None else np.atleast_1d(np.asarray(shares, dtype=float))
    if q.ndim != 1 or not len(q) or not ((q > 0) & (q <= 1)).all():
        raise ValueError("shares must be numbers above 0 and at most 1")
    order, groups = _order(scores)
    ranked, mean = effects[order], effects.mean()
    values, errors = np.empty(len(q)), np.empty(len(q))
    for index, share in enumerate(q):
        taken, edge = _first(ranked, groups, share)
        values[index] = (taken @ ranked) / (share * len(ranked)) - mean
        errors[index] = _standard_error(taken * (ranked - edge) / share - ranked)
    return TocCurve(q, values, errors)


def policy_value(
    effects: Any, scores: Any, *, share: float | None = None, outcomes: Any = None, cost: float = 0.0
) -> Estimate:
    """Mean outcome when those ranked first are treated.

    Parameters
    ----------
    effects, scores : float arrays (n,)
        As in `autoc`.
    share : float in [0, 1], optional
        Share that is treated. None averages over the first 1, 2 .. n, which is the paper's policy value.
    outcomes : float array (n,), optional
        Outcomes without treatment (known, or their doubly robust scores). Without them the value is the gain over treating nobody.
    cost : float
        Cost of one treatment, in the outcome's unit; taken off the effects.

    Raises
    ------
    ValueError
        As in `autoc`, and for a share out of range.
    """
    effects, scores = _checked(effects, scores)
    effects = effects - float(cost)
    base = np.zeros(len(effects)) if outcomes is None else _numbers(outcomes, "outcomes")
    if len(base) != len(effects):
        raise ValueError(f"outcomes has {len(base)} rows, effects has {len(effects)}")
    order, groups = _order(scores)
    ranked, base, n = effects[order], base[order], len(effects)
    if share is None:
        sums = np.cumsum(_shared(ranked, groups)) / n
        later = _shared(np.arange(n, 0, -1) / n, groups)
        return Estimate(
            float(base.mean() + sums.mean()), _standard_error(base + _shared(sums, groups) + later * ranked)
        )
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie between 0 and 1, got {share!r}")
    if share == 0.0:
        return Estimate(float(base.mean()), _standard_error(base))
    taken, edge = _first(ranked, groups, share)
    return Estimate(float(base.mean() + (taken @ ranked) / n), _standard_error(base + taken * (ranked - edge)))


# --- is there a ranking? -------------------------------------------------------------------------------------------

#: Parts of the rows: the first two train the first learner, each later one tests the learner of all before it.
PARTS = 6
FIRST = 2


@dataclass(frozen=True)
class Assessment:
    """What a ranking is worth on rows that it was not learnt from.

    Attributes
    ----------
    autoc : Estimate
        Mean over the tested parts; a random order has 0.
    p_value : float
        One-sided, of "no better than a random order".
    detectable : bool
        Whether `p_value` is below `level`.
    curve : TocCurve
        Mean over the tested parts.
    level : float
    tested : int
        Rows that took part in the test.
    """

    autoc: Estimate
    p_value: float
    detectable: bool
    curve: TocCurve
    level: float
    tested: int

    def __str__(self) -> str:
        number = f"AUTOC {self.autoc} against 0 for a random order, p = {self.p_value:.2g}, on {self.tested:,} rows"
        if self.detectable:
            return f"There is a ranking: {number}."
        return f"No detectable ranking: {number}. Nothing here tells whom to treat first."


def assess(
    learner: Any, Y: Any, T: Any, *, X: Any, W: Any = None, level: float = 0.05, random_state: int = 0
) -> Assessment:
    """Test whether `learner` finds a ranking better than a random order.

    The rows are cut into six parts. The learner is fitted to the first two and tested on the third, fitted to the first three and tested on
    the fourth, and so on: each test is on rows that nothing was learnt from, and given the past each test statistic has mean zero
    where no ranking exists. So their mean may be compared with the normal law, which does not hold of ordinary cross-validation, whose folds train
    each other (Wager, 2024, "Sequential validation of treatment heterogeneity", arXiv:2405.05534). Costs four fits.

    Parameters
    ----------
    learner : RankLearner
        Cloned, never fitted itself.
    Y, T, X, W
        As in `RankLearner.fit`; at least 60 rows.
    level : float
        Error rate of the test.
    random_state : int
        Of the cut.

    Raises
    ------
    ValueError
        Fewer than 60 rows, `level` out of range, or as in `RankLearner.fit`.
    """
    from sklearn.model_selection import StratifiedKFold  # slow to import

    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    n = n_rows(X)
    if n < 60:
        raise ValueError(f"{n} rows are too few to learn a ranking from some and test it on others; it takes 60")
    Y, T = np.asarray(Y).reshape(-1), np.asarray(T).reshape(-1)
    for name, values in (("Y", Y), ("T", T)):
        if len(values) != n:
            raise ValueError(f"{name} has {len(values)} rows, X has {n}")
    arms, counts = np.unique(T.astype(str), return_counts=True)
    if len(arms) != 2 or counts.min() < 3 * PARTS:
        raise ValueError(
            f"an assessment needs two arms of at least {3 * PARTS} rows each; T has {dict(zip(arms.tolist(), counts.tolist(), strict=True))}"
        )
    cut = StratifiedKFold(PARTS, shuffle=True, random_state=random_state).split(np.zeros((n, 1)), T.astype(str))
    parts = [test for _, test in cut]
    estimates, curves, tested = [], [], 0
    for position in range(FIRST, PARTS):
        train, test = np.sort(np.concatenate(parts[:position])), parts[position]
        fitted = clone(learner).fit(Y[train], T[train], X=rows_of(X, train), W=None if W is None else rows_of(W, train))
        scores = fitted.predict(rows_of(X, test))
        effects = fitted.doubly_robust_scores(
            Y[test], T[test], X=rows_of(X, test), W=None if W is None else rows_of(W, test)
        )
        estimates.append(autoc(effects, scores))
        curves.append(toc_curve(effects, scores))
        tested += len(test)
    overall = _mean(estimates)
    if overall.standard_error > 0:
        p = float(ndtr(-overall.value / overall.standard_error))
    else:
        p = 1.0  # every score equal: a random order by another name
    return Assessment(overall, p, p < level, _mean_curve(curves), level, tested)


def _mean(estimates: list[Estimate]) -> Estimate:
    count = len(estimates)
    return Estimate(
        float(np.mean([e.value for e in estimates])),
        float(np.sqrt(sum(e.standard_error**2 for e in estimates)) / count),
    )


def _mean_curve(curves: list[TocCurve]) -> TocCurve:
    errors = np.sqrt(np.sum([c.standard_errors**2 for c in curves], axis=0)) / len(curves)
    return TocCurve(curves[0].shares, np.mean([c.values for c in curves], axis=0), errors)


# --- order, ties, errors --------------------------------------------------------------------------------------------


def _numbers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"{name} must be one number a row, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has {int((~np.isfinite(array)).sum())} values that are missing or infinite")
    return array


def _checked(effects: Any, scores: Any) -> tuple[np.ndarray, np.ndarray]:
    effects, scores = _numbers(effects, "effects"), _numbers(scores, "scores")
    if len(effects) != len(scores):
        raise ValueError(f"effects has {len(effects)} rows, scores has {len(scores)}")
    if len(effects) < 2:
        raise ValueError(f"a ranking needs at least two rows, got {len(effects)}")
    return effects, scores


def _order(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows from the largest score to the smallest, and for every place the number of its group of equal scores."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    return order, np.concatenate([[0], np.cumsum(ranked[1:] != ranked[:-1])])


def _shared(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """`values` replaced by their mean within each group of ties."""
    if groups[-1] == len(groups) - 1:
        return values
    return (np.bincount(groups, weights=values) / np.bincount(groups))[groups]


def _autoc_without_each(ranked: np.ndarray, groups: np.ndarray, means: np.ndarray) -> np.ndarray:
    """AUTOC of all rows but one, for every row in the order of its rank, (n,); O(n) from running sums.

    Without row i of a group at places a + 1 .. a + m the means before the group stay; the m - 1 rows left share the group's places, and
    every later sum of k rows becomes one of k - 1 that lacks the row's effect.
    """
    n = len(ranked)
    place = np.arange(1, n + 1)
    size = np.bincount(groups)
    end = np.cumsum(size)
    start = end - size
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / place)])
    sums = np.concatenate([[0.0], means * place])
    before = np.concatenate([[0.0], np.cumsum(means)])[start]
    fewer = np.concatenate([[0.0, 0.0], 1.0 / place[:-1]])  # 1 / (k - 1) at index k, where k > 1
    later_sums = np.cumsum((sums * fewer)[::-1])[::-1]
    later_counts = np.cumsum(fewer[::-1])[::-1]
    later_sums = np.append(later_sums, 0.0)[end + 1]
    later_counts = np.append(later_counts, 0.0)[end + 1]
    shared = harmonic[np.maximum(end - 1, start)] - harmonic[start]
    steps = (size - 1) - start * shared  # sum of j / (a + j) over j < m
    total = np.bincount(groups, weights=ranked)
    left = (total[groups] - ranked) / np.maximum(size[groups] - 1, 1)
    outer = (before + sums[start] * shared + later_sums)[groups] + left * steps[groups] - ranked * later_counts[groups]
    return (outer - (ranked.sum() - ranked)) / (n - 1)


def _first(ranked: np.ndarray, groups: np.ndarray, share: float) -> tuple[np.ndarray, float]:
    """How much of each place belongs to the first `share`, and the mean effect around the last place.

    The last place moves with the sample, and every row that enters there brings the effect at the edge; it is estimated from about
    sqrt(n) neighbours on either side.
    """
    n = len(ranked)
    taken = _shared(np.clip(share * n - np.arange(n), 0.0, 1.0), groups)
    width, last = int(np.ceil(np.sqrt(n))), int(np.ceil(share * n)) - 1
    return taken, float(ranked[max(0, last - width) : last + width + 1].mean())


def _standard_error(influence: np.ndarray) -> float:
    n = len(influence)
    return float(np.std(influence, ddof=1) / np.sqrt(n))
