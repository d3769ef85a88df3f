"""Measures of a method against its competitors, paired by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import polars as pl

from cameraready.evidence.measures.base import Interval, Measure
from cameraready.evidence.measures.blocks import (
    EMPTY,
    FAILED,
    NOT_FINITE,
    OK,
    BlockTable,
    Grid,
    Repeats,
    arms_in,
    gather,
    require_columns,
    sort_out,
)


@dataclass(frozen=True)
class _Pair(Measure):
    """What measures of a method against one peer share: two aligned columns of block values."""

    column: str
    method: str
    peer: str
    repeats: Repeats = "mean"

    def __post_init__(self) -> None:
        if self.method == self.peer:
            raise ValueError(f"a measure compares two arms, got {self.method!r} twice")

    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def subjects(self) -> tuple[str, ...]:
        return (self.method,)

    def arms(self) -> tuple[str, ...]:
        return (self.method, self.peer)

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        grid = gather(frame, arms_col, block_col, self.columns(), self.arms(), self.repeats)
        keep, broken, lost, unfinished = sort_out(grid, self.arms(), subjects=1)
        values, notes, trouble = self._contrast(grid.values[keep, 0, 0], grid.values[keep, 1, 0])
        names = tuple(name for name, kept in zip(grid.names, keep, strict=True) if kept)
        return BlockTable(names, values, (), broken, lost, unfinished, notes, trouble)

    def _contrast(self, mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], str]:
        raise NotImplementedError


def _log_ratio(
    mine: np.ndarray, theirs: np.ndarray, floor: float, what: str
) -> tuple[np.ndarray, tuple[str, ...], str]:
    """Logarithm of mine / theirs, (n,) each, with a sentence for every departure from positive numbers.

    Values under `floor` count as `floor`. Two exact zeros are equal: their ratio is 1, with a note. One zero, or a
    negative number, leaves the geometric mean undefined: a sentence says so and the log ratio is NaN.
    """
    notes: list[str] = []
    n = len(mine)
    if floor > 0:
        low = int(((mine < floor) | (theirs < floor)).sum())
        if low:
            notes.append(f"in {low} of {n} blocks values of {what} under {floor:g} were counted as {floor:g}")
        mine, theirs = np.maximum(mine, floor), np.maximum(theirs, floor)
    equal = (mine == 0) & (theirs == 0)
    if equal.any():
        notes.append(f"in {int(equal.sum())} of {n} blocks {what} is exactly zero on both sides, counted as ratio 1")
    mine, theirs = np.where(equal, 1.0, mine), np.where(equal, 1.0, theirs)
    negative = int(((mine < 0) | (theirs < 0)).sum())
    zero = int(((mine == 0) ^ (theirs == 0)).sum())
    trouble = ""
    if negative:
        trouble = f"{what} is negative in {negative} of {n} blocks, where a ratio says nothing; a difference would"
    elif zero:
        trouble = (
            f"{what} is exactly zero on one side only in {zero} of {n} blocks, where a geometric ratio is undefined;"
            " a floor (the measurement's resolution) or a difference would be"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(mine) - np.log(theirs)
    return np.where(np.isfinite(log), log, np.nan), tuple(notes), trouble


def check_floor(floor: float) -> None:
    if not (np.isfinite(floor) and floor >= 0):
        raise ValueError(f"floor must be a finite number >= 0, got {floor!r}")


@dataclass(frozen=True)
class Ratio(_Pair):
    """Geometric mean over blocks of method / peer. Values: log ratios (n, 1)."""

    log_scale: ClassVar[bool] = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_floor(self.floor)

    def describe(self) -> str:
        return f"{self.column} of {self.method} / {self.column} of {self.peer}, geometric mean over blocks"

    def _contrast(self, mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], str]:
        log, notes, trouble = _log_ratio(mine, theirs, self.floor, self.column)
        return log[:, None], notes, trouble


@dataclass(frozen=True)
class RatioOfSums(_Pair):
    """Sum over blocks of the method / sum over blocks of the peer. Values: (n, 2), method and peer."""

    interval: ClassVar[Interval] = "skew"
    log_scale: ClassVar[bool] = True

    def describe(self) -> str:
        return f"summed {self.column} of {self.method} / summed {self.column} of {self.peer}"

    def _contrast(self, mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], str]:
        n, trouble = len(mine), ""
        negative = int(((mine < 0) | (theirs < 0)).sum())
        if negative:
            trouble = f"{self.column} is negative in {negative} of {n} blocks, where a ratio of sums says nothing"
        else:
            for arm, column in ((self.method, mine), (self.peer, theirs)):
                if n > 1 and np.count_nonzero(column) < 2:
                    trouble = (
                        f"{self.column} of {arm} is zero in all but one of {n} blocks, or in all: no ratio of sums"
                    )
        return np.stack([mine, theirs], axis=1), (), trouble

    def centre(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = np.log(values.sum(axis=-2))
            return sums[..., 0] - sums[..., 1]

    def influence(self, values: np.ndarray) -> np.ndarray:
        # The jackknife's: at ten skewed blocks the delta method's standard error is too small by a tenth.
        sums = values.sum(axis=-2, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            without = np.log(sums - values)
            whole = np.log(sums)
        change = (whole - without)[..., 0] - (whole - without)[..., 1]
        return (values.shape[-2] - 1) * (change - change.mean(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Difference(_Pair):
    """Mean over blocks of method - peer. Values: differences (n, 1)."""

    interval: ClassVar[Interval] = "skew"

    def describe(self) -> str:
        return f"{self.column} of {self.method} - {self.column} of {self.peer}, mean over blocks"

    def _contrast(self, mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], str]:
        return (mine - theirs)[:, None], (), ""


@dataclass(frozen=True)
class WinRate(_Pair):
    """Share of blocks that the method wins, ties counting half. Values: 1, 0.5 or 0, (n, 1)."""

    interval: ClassVar[Interval] = "exact"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    lower_is_better: bool = True

    def describe(self) -> str:
        word = "smaller" if self.lower_is_better else "larger"
        return f"share of blocks in which {self.column} of {self.method} is {word} than that of {self.peer}, ties half"

    def _contrast(self, mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], str]:
        sign = 1 if self.lower_is_better else -1
        return 0.5 + 0.5 * np.sign(sign * (theirs - mine))[:, None], (), ""


@dataclass(frozen=True)
class VersusBest(Measure):
    """The method against the best peer: ONE peer, the best over all blocks. Values: a contrast per peer, (n, peers)."""

    column: str
    method: str
    peers: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    kind: Literal["ratio", "difference"] = "ratio"
    lower_is_better: bool = True
    repeats: Repeats = "mean"
    floor: float = 0.0
    interval: ClassVar[Interval] = "best"

    @property
    def log_scale(self) -> bool:  # type: ignore[override]
        return self.kind == "ratio"

    @property
    def sign(self) -> int:
        """1 where the best peer is the one with the largest contrast (lower is better), otherwise -1."""
        return 1 if self.lower_is_better else -1

    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def subjects(self) -> tuple[str, ...]:
        return (self.method,)

    def arms(self) -> tuple[str, ...]:
        return (self.method, *(self.peers or ()))

    def named_arms(self) -> tuple[str, ...] | None:
        return None if self.peers is None else self.arms()

    def describe(self) -> str:
        best = f"the best of {', '.join(self.peers)}" if self.peers else "the best other arm"
        if self.kind == "ratio":
            return f"{self.column} of {self.method} / {self.column} of {best} over all blocks, geometric mean"
        return f"{self.column} of {self.method} - {self.column} of {best} over all blocks, mean"

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> BlockTable:
        require_columns(frame, [arms_col, block_col, self.column])
        rivals = [a for a in arms_in(frame, arms_col) if a != self.method] if self.peers is None else list(self.peers)
        rivals = [a for a in rivals if a not in self.exclude]
        grid = gather(frame, arms_col, block_col, self.columns(), [self.method, *rivals], self.repeats)
        # A peer that fails more often than not is no best peer; keeping it would cost most blocks. It is named.
        unusable = np.isin(grid.state, (FAILED, NOT_FINITE, EMPTY)).sum(axis=0)
        seen = unusable + (grid.state == OK).sum(axis=0)
        good = [j for j in range(1, len(rivals) + 1) if seen[j] and 2 * unusable[j] <= seen[j]]
        notes = [
            f"{arm} was set aside: it failed or returned nothing usable in {unusable[j]} of {seen[j]} blocks"
            for j, arm in enumerate(rivals, start=1)
            if seen[j] and j not in good
        ]
        arms = [rivals[j - 1] for j in good]
        picked = [0, *good]
        grid = Grid(grid.names, grid.values[:, picked], grid.state[:, picked])
        keep, broken, lost, unfinished = sort_out(grid, [self.method, *arms], subjects=1)
        names = tuple(name for name, kept in zip(grid.names, keep, strict=True) if kept)
        mine = grid.values[keep, :1, 0]
        contrasts, trouble = np.empty((len(names), len(arms))), ""
        for j, arm in enumerate(arms):
            theirs = grid.values[keep, 1 + j, 0]
            if self.kind == "difference":
                contrasts[:, j] = mine[:, 0] - theirs
                continue
            what = f"{self.column} of {self.method} or {arm}"
            contrasts[:, j], more, wrong = _log_ratio(mine[:, 0], theirs, self.floor, what)
            notes.extend(more)
            trouble = trouble or wrong
        if not arms:
            trouble = "there is no other arm to compare with"
        return BlockTable(names, contrasts, tuple(arms), broken, lost, unfinished, tuple(notes), trouble)

    def centre(self, values: np.ndarray) -> np.ndarray:
        means = values.mean(axis=-2)
        return means.max(axis=-1) if self.sign > 0 else means.min(axis=-1)

    def chosen(self, values: np.ndarray, arms: Sequence[str]) -> str:
        means = self.sign * np.asarray(values).mean(axis=-2)
        return arms[int(np.argmax(means))]
