"""Measures: a number per block and a vectorised reduction over blocks.

A measure turns the rows of a run into a `BlockTable` (`Measure.blocks`), and a table's values into one number
(`Measure.reduce`), for any number of resamples at once. Build one with the functions below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import polars as pl

from cameraready.evidence.measures.base import Measure
from cameraready.evidence.measures.blocks import BlockTable, MissingColumn, Repeats
from cameraready.evidence.measures.paired import Difference, Ratio, RatioOfSums, VersusBest, WinRate, check_floor
from cameraready.evidence.measures.single import Average, Growth, RankCorrelation, RankCorrelationWithin, Violations

__all__ = [
    "BlockTable",
    "Measure",
    "MissingColumn",
    "VersusBest",
    "Violations",
    "average",
    "difference",
    "growth",
    "rank_correlation",
    "ratio",
    "ratio_of_sums",
    "versus_best",
    "violations",
    "win_rate",
]


def ratio(column: str, method: str, peer: str, *, floor: float = 0.0, repeats: Repeats = "mean") -> Ratio:
    """Geometric mean over blocks of ``column`` of `method` divided by that of `peer`; interval: t on log ratios.

    Several rows of an arm in a block become one by `repeats` first. Values under `floor` (the resolution of the
    measurement, such as rounding errors) count as `floor`. Two exact zeros count as ratio 1, with a note; a zero on one
    side or a negative value leaves the claim inconclusive, with the reason. For sums and negative values see
    `ratio_of_sums` and `difference`.
    """
    return Ratio(column, method, peer, repeats, floor)


def ratio_of_sums(column: str, method: str, peer: str, *, repeats: Repeats = "mean") -> RatioOfSums:
    """Sum of ``column`` over blocks of `method` divided by that of `peer` (total cost, not the typical block's)."""
    return RatioOfSums(column, method, peer, repeats)


def difference(column: str, method: str, peer: str, *, repeats: Repeats = "mean") -> Difference:
    """Mean over blocks of ``column`` of `method` minus that of `peer`."""
    return Difference(column, method, peer, repeats)


def win_rate(
    column: str, method: str, peer: str, *, lower_is_better: bool = True, repeats: Repeats = "mean"
) -> WinRate:
    """Share of blocks in which `method` beats `peer` in ``column``; a tie counts half."""
    return WinRate(column, method, peer, repeats, lower_is_better)


def average(column: str, arm: str, *, repeats: Repeats = "mean") -> Average:
    """Mean over blocks of ``column`` of one arm."""
    return Average(column, arm, repeats)


def growth(column: str, over: str, arm: str) -> Growth:
    """Exponent with which ``column`` of `arm` grows in ``over``: slope of the logarithms in each block, averaged."""
    return Growth(column, arm, over)


def rank_correlation(
    x: str, y: str, arm: str, *, across: Literal["blocks", "rows"] = "blocks"
) -> RankCorrelation | RankCorrelationWithin:
    """Spearman's correlation of columns `x` and `y` of one arm.

    `across` ``"blocks"``: one point a block (several rows are averaged first). ``"rows"``: over the rows of each block,
    then averaged over blocks.
    """
    if across == "blocks":
        return RankCorrelation(x, arm, y)
    if across == "rows":
        return RankCorrelationWithin(x, arm, y)
    raise ValueError(f"across must be 'blocks' or 'rows', got {across!r}")


def violations(expression: pl.Expr, what: str = "") -> Violations:
    """Rows in which a boolean polars expression is true, counted per block; goes with the rule `always`.

    `what` says in words what such a row has: "a deviation above 1e-9".
    """
    if not isinstance(expression, pl.Expr):
        raise TypeError(f"violations() needs a polars expression such as pl.col('gap') > 0, got {expression!r}")
    return Violations(expression, what)


def versus_best(
    column: str,
    method: str,
    peers: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    kind: Literal["ratio", "difference"] = "ratio",
    lower_is_better: bool = True,
    *,
    repeats: Repeats = "mean",
    floor: float = 0.0,
) -> VersusBest:
    """`method` against the best peer in ``column``: one peer, the best over all blocks, re-chosen in each resample.

    Parameters
    ----------
    peers : sequence of str, optional
        The competitors; None takes every other arm in the rows, a user's own included.
    exclude : sequence of str
        Arms that are no competitors: variants of the method itself, a ground truth.
    kind : {"ratio", "difference"}
        Geometric mean of method / peer, or mean of method - peer.
    repeats, floor
        As in `ratio`.
    """
    if kind not in ("ratio", "difference"):
        raise ValueError(f"kind must be 'ratio' or 'difference', got {kind!r}")
    if isinstance(peers, str) or isinstance(exclude, str):
        raise TypeError("peers and exclude are sequences of arm names, got a single string")
    if peers is not None and (not peers or method in peers):
        raise ValueError(f"peers must name at least one arm other than {method!r}, got {list(peers)}")
    check_floor(floor)
    chosen = None if peers is None else tuple(peers)
    return VersusBest(column, method, chosen, tuple(exclude), kind, lower_is_better, repeats, floor)
