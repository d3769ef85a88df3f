"""Measures of one arm by itself, and the census of violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import polars as pl
from scipy.stats import rankdata

from cameraready.evidence.measures.base import Interval, Measure
from cameraready.evidence.measures.blocks import (
    BlockTable,
    Repeats,
    done,
    gather,
    require_columns,
    rows_by_block,
    sort_out,
    with_engine_columns,
)


@dataclass(frozen=True)
class _Single(Measure):
    """What measures of one arm share."""

    column: str
    arm: str

    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def subjects(self) -> tuple[str, ...]:
        return (self.arm,)

    def _one_per_block(
        self,
        frame: pl.DataFrame,
        arms_col: str,
        block_col: str,
        *,
        repeats: Repeats = "mean",
        statistic: Callable[[np.ndarray], float | str] | None = None,
    ) -> BlockTable:
        """Block means of the columns, or `statistic` of each block's rows (rows, columns), which may explain itself."""
        grid = gather(frame, arms_col, block_col, self.columns(), [self.arm], repeats)
        keep, broken, lost, unfinished = sort_out(grid, [self.arm], subjects=1)
        names = tuple(name for name, kept in zip(grid.names, keep, strict=True) if kept)
        if statistic is None:
            return BlockTable(names, grid.values[keep, 0, :], (), broken, lost, unfinished)
        rows = rows_by_block(frame, arms_col, block_col, self.columns(), self.arm)
        found = {name: statistic(rows[name]) for name in names}
        undefined = {name: why for name, why in found.items() if isinstance(why, str)}
        trouble = ""
        if undefined:
            block, why = next(iter(undefined.items()))
            trouble = f"in {len(undefined)} of {len(names)} blocks {why} (block {block})"
        values = np.array([[np.nan if isinstance(v, str) else v] for v in found.values()], dtype=float)
        return BlockTable(names, values.reshape(-1, 1), (), broken, lost, unfinished, (), trouble)


@dataclass(frozen=True)
class Average(_Single):
    """Mean over blocks of one arm. Values: (n, 1)."""

    interval: ClassVar[Interval] = "skew"
    repeats: Repeats = "mean"

    def describe(self) -> str:
        return f"{self.column} of {self.arm}, mean over blocks"

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        return self._one_per_block(frame, arms_col, block_col, repeats=self.repeats)


@dataclass(frozen=True)
class Growth(_Single):
    """Mean over blocks of the slope of log `column` on log `over` (the exponent of a power law). Values: (n, 1)."""

    interval: ClassVar[Interval] = "skew"
    over: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.column, self.over)

    def describe(self) -> str:
        return f"exponent of {self.column} of {self.arm} in {self.over}, least squares on logarithms, mean over blocks"

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        return self._one_per_block(frame, arms_col, block_col, statistic=self._slope)

    def _slope(self, rows: np.ndarray) -> float | str:
        if (rows <= 0).any():
            return f"{self.column} or {self.over} is not positive, so that it has no logarithm"
        y, x = np.log(rows).T
        if np.ptp(x) == 0:
            return f"there is only one value of {self.over}, so that nothing grows"
        return float(((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum())


@dataclass(frozen=True)
class RankCorrelation(_Single):
    """Spearman's correlation of two columns over blocks. Values: the block means of both, (n, 2)."""

    interval: ClassVar[Interval] = "fisher"
    bounds: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    y: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.column, self.y)

    def describe(self) -> str:
        return f"rank correlation of {self.column} and {self.y} of {self.arm} over blocks"

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        table = self._one_per_block(frame, arms_col, block_col)
        for column, values in zip(self.columns(), table.values.T, strict=True):
            if len(values) and np.ptp(values) == 0:
                return replace(table, trouble=f"{column} is the same in every block, so that it has no ranks")
        return table

    def centre(self, values: np.ndarray) -> np.ndarray:
        return spearman(values[..., 0], values[..., 1])

    def influence(self, values: np.ndarray) -> np.ndarray:
        # The jackknife's: ranks change all over when a block is left out.
        n = values.shape[-2]
        others = np.nonzero(~np.eye(n, dtype=bool))[1].reshape(n, n - 1)
        without = self.centre(values[..., others, :])
        change = self.centre(values)[..., None] - np.nan_to_num(without)
        return (n - 1) * (change - change.mean(axis=-1, keepdims=True))


@dataclass(frozen=True)
class RankCorrelationWithin(_Single):
    """Mean over blocks of Spearman's correlation of two columns over the rows of a block. Values: (n, 1)."""

    interval: ClassVar[Interval] = "skew"
    bounds: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    y: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.column, self.y)

    def describe(self) -> str:
        return f"rank correlation of {self.column} and {self.y} of {self.arm} within a block, mean over blocks"

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        return self._one_per_block(frame, arms_col, block_col, statistic=self._correlation)

    def _correlation(self, rows: np.ndarray) -> float | str:
        if len(rows) < 3 or (np.ptp(rows, axis=0) == 0).any():
            return f"{self.column} and {self.y} have no rank correlation: fewer than three rows, or all equal"
        return float(spearman(rows[:, 0], rows[:, 1]))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis, average ranks for ties: (..., n), (..., n) -> (...)."""
    a, b = rankdata(x, axis=-1), rankdata(y, axis=-1)
    a, b = a - a.mean(axis=-1, keepdims=True), b - b.mean(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(axis=-1) / np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))


@dataclass(frozen=True, eq=False)
class Violations(Measure):
    """Number of rows in which `expression` is true. Values: the count of each block, (n, 1).

    A row in which the expression is null, or false on a NaN, proves nothing: they are counted and forbid ``holds``.
    """

    expression: pl.Expr
    what: str = ""
    interval: ClassVar[Interval] = "none"

    def describe(self) -> str:
        return f"rows with {self.what or self.expression}, counted"

    def named_arms(self) -> tuple[str, ...] | None:
        return None

    def columns(self) -> tuple[str, ...]:
        return tuple(self.expression.meta.root_names())

    def centre(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0].sum(axis=-1)

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        require_columns(frame, [arms_col, block_col, *self.columns()])
        frame = with_engine_columns(frame).with_columns(pl.col(block_col).cast(pl.String).alias("_block"))
        floats = [c for c in self.columns() if frame.schema[c].is_float()]
        nan = pl.any_horizontal([pl.col(c).is_nan() for c in floats]).fill_null(False) if floats else pl.lit(False)
        counted = (
            frame.filter(done() & pl.col("_block").is_not_null())
            .with_columns(self.expression.alias("_violated"), nan.alias("_nan"))
            .group_by("_block", maintain_order=True)
            .agg(
                pl.col("_violated").fill_null(False).sum().alias("_count"),
                (pl.col("_violated").is_null() | (pl.col("_nan") & ~pl.col("_violated"))).sum().alias("_unread"),
            )
        )
        failed = set(frame.filter(~done()).get_column("_block").drop_nulls().to_list())
        names, counts = counted.get_column("_block").to_list(), counted.get_column("_count").to_numpy()
        unread = counted.get_column("_unread").to_list()
        broken = {
            name: f"in {rows} rows the condition could not be evaluated (missing value or NaN)"
            for name, rows in zip(names, unread, strict=True)
            if rows
        }
        lost = dict.fromkeys(sorted(failed - set(broken)), "a trial failed")
        # A block with a violation counts even where other rows of it are missing: a counter-example stands.
        keep = [i for i, name in enumerate(names) if counts[i] or not (name in broken or name in lost)]
        values = counts[keep].astype(float).reshape(-1, 1)
        return BlockTable(tuple(names[i] for i in keep), values, (), broken, lost)
