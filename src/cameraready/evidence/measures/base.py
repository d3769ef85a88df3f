"""What every measure offers: numbers per block, a reduction over blocks, and what its interval needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import polars as pl

from cameraready.evidence.measures.blocks import BlockTable

#: The constructions in `cameraready.evidence.measures.intervals`.
Interval = Literal["t", "skew", "exact", "fisher", "best", "none"]


@dataclass(frozen=True)
class Measure:
    """Base of the measures; use the functions below.

    Every measure is a smooth function of block means, on a working scale (the logarithm for ratios) on which its
    interval is made.
    """

    interval: ClassVar[Interval] = "t"
    log_scale: ClassVar[bool] = False
    #: Limits that a value cannot pass, for clipping an interval.
    bounds: ClassVar[tuple[float, float]] = (-np.inf, np.inf)

    def describe(self) -> str:
        """The measure in words."""
        raise NotImplementedError

    def columns(self) -> tuple[str, ...]:
        """The columns that the rows must have."""
        raise NotImplementedError

    def subjects(self) -> tuple[str, ...]:
        """The arms that the statement is about: their failures forbid ``holds``."""
        return ()

    def arms(self) -> tuple[str, ...]:
        """Every arm that must have rows."""
        return self.subjects()

    def named_arms(self) -> tuple[str, ...] | None:
        """Every arm whose rows are looked at; None where that is all of them."""
        return self.arms()

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        """The blocks of one workload's rows.

        Raises
        ------
        MissingColumn
            When no row has a column that the measure needs.
        ValueError
            When such a column holds no numbers.
        """
        raise NotImplementedError

    def centre(self, values: np.ndarray) -> np.ndarray:
        """The measure on its working scale: (..., n, k) -> (...)."""
        return values[..., 0].mean(axis=-1)

    def influence(self, values: np.ndarray) -> np.ndarray:
        """What each block adds to `centre`, to first order: (..., n, k) -> (..., n), with mean zero.

        The interval's standard error is that of the mean of these values.
        """
        return values[..., 0] - values[..., 0].mean(axis=-1, keepdims=True)

    def from_working(self, x: np.ndarray | float) -> np.ndarray:
        """From the working scale to the measure's own."""
        return np.exp(x) if self.log_scale else np.clip(x, *self.bounds)

    def reduce(self, values: np.ndarray) -> np.ndarray:
        """The measure: (..., n, k) -> (...), vectorised over leading dimensions (resamples)."""
        return self.from_working(self.centre(values))

    def chosen(self, values: np.ndarray, arms: Sequence[str]) -> str:
        """The peer that `reduce` compares with, for measures that choose one; otherwise empty."""
        return ""
