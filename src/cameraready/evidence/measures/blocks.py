"""From the rows of a run to one line of numbers per block, with every block that is left out accounted for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import polars as pl

#: How several rows of one arm in one block become one number.
Repeats = Literal["mean", "median", "min"]

OK, FAILED, NOT_FINITE, EMPTY, ABSENT = range(5)
_WHY = {FAILED: "failed", NOT_FINITE: "returned NaN or infinity", EMPTY: "returned no value"}


class MissingColumn(ValueError):
    """A measure asks for a column that no row of the run has."""


@dataclass(frozen=True)
class BlockTable:
    """What a measure reduces.

    Attributes
    ----------
    names : tuple of str, length n
        The blocks that count, in the order of the run.
    values : float64 array of shape (n, k)
        One row a block; what the columns mean is the measure's own business (see its docstring).
    arms : tuple of str
        The peers behind the columns, for measures that choose among peers; empty otherwise.
    broken : mapping of block to sentence
        Blocks left out because the method itself failed or returned NaN or infinity there. They forbid ``holds``.
    lost : mapping of block to sentence
        Blocks left out because a peer failed or returned nothing usable there.
    unfinished : tuple of str
        Blocks whose trials have not all run yet.
    notes : tuple of str
        Sentences that belong beside the verdict.
    trouble : str
        Why the measure is not defined on these values; empty when it is.
    """

    names: tuple[str, ...]
    values: np.ndarray
    arms: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class Grid:
    """Values by block and arm: `values` (n, arms, columns) float64, NaN where `state` (n, arms) is not `OK`."""

    names: tuple[str, ...]
    values: np.ndarray
    state: np.ndarray


def require_columns(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    """Raises `MissingColumn`, with the near misses, unless `frame` has all `columns`."""
    for column in columns:
        if column not in frame.columns:
            near = difflib.get_close_matches(column, frame.columns, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the rows have {', '.join(frame.columns)}"
            raise MissingColumn(f"no row of this run has the column {column!r}; {hint}")


def done() -> pl.Expr:
    """Whether a row came from a trial that finished (used after `with_engine_columns`)."""
    return pl.col("status").is_null() | (pl.col("status") == "done")


def with_engine_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with ``status`` and ``trial`` filled in where a hand-made frame has none."""
    if "status" not in frame.columns:
        frame = frame.with_columns(pl.lit("done").alias("status"))
    if "trial" not in frame.columns:
        frame = frame.with_columns(pl.int_range(pl.len()).cast(pl.String).alias("trial"))
    return frame


def numbers(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """`frame` with `columns` as float64; text that is no number raises ValueError."""
    for column in columns:
        dtype = frame.schema[column]
        if dtype != pl.Null and not dtype.is_numeric() and dtype != pl.Boolean:
            raise ValueError(f"column {column!r} holds {dtype}, a measure needs numbers")
    return frame.with_columns(pl.col(list(columns)).cast(pl.Float64))


def arms_in(frame: pl.DataFrame, arms_col: str) -> list[str]:
    """The arms that have any row, failed ones included, in order of appearance."""
    return frame.get_column(arms_col).drop_nulls().cast(pl.String).unique(maintain_order=True).to_list()


def gather(
    frame: pl.DataFrame,
    arms_col: str,
    block_col: str,
    columns: Sequence[str],
    arms: Sequence[str],
    repeats: Repeats = "mean",
) -> Grid:
    """One number for each (block, arm, column), and the reason where there is none.

    Done rows that do not carry all `columns` (null) are not rows of this measure. A failed trial makes its (block,
    arm) `FAILED` even where other trials of that block and arm succeeded: what is left would not be comparable. A
    failed row without an arm counts for every arm, one without a block for every block that lacks a value. A
    (block, arm) with fewer trials, relative to the most that the arm has in a block, than another arm of that block
    is `ABSENT`: an interrupted run has not come to the rest.
    """
    require_columns(frame, [arms_col, block_col, *columns])
    frame = numbers(with_engine_columns(frame), columns).with_columns(
        pl.col(arms_col).cast(pl.String).alias("_arm"), pl.col(block_col).cast(pl.String).alias("_block")
    )
    names = frame.get_column("_block").drop_nulls().unique(maintain_order=True).to_list()
    row_of = {name: i for i, name in enumerate(names)}
    col_of = {arm: j for j, arm in enumerate(arms)}
    values = np.full((len(names), len(arms), len(columns)), np.nan)
    state = np.full((len(names), len(arms)), ABSENT, dtype=np.int8)
    trials = np.zeros(state.shape)

    mine = frame.filter(done() & pl.col("_arm").is_in(list(arms)) & pl.col("_block").is_not_null())
    carries = pl.all_horizontal(pl.col(column).is_not_null() for column in columns)
    how = {"mean": pl.Expr.mean, "median": pl.Expr.median, "min": pl.Expr.min}[repeats]
    cells = mine.group_by("_block", "_arm", maintain_order=True).agg(
        *(how(pl.col(c).filter(carries)).alias(f"_value{i}") for i, c in enumerate(columns)),
        *(pl.col(c).filter(carries).is_finite().all().alias(f"_finite{i}") for i, c in enumerate(columns)),
        carries.sum().alias("_rows"),
        pl.col("trial").filter(carries).n_unique().alias("_trials"),
    )
    for cell in cells.iter_rows(named=True):
        at = row_of[cell["_block"]], col_of[cell["_arm"]]
        if not cell["_rows"]:
            state[at] = EMPTY
            continue
        trials[at] = cell["_trials"]
        finite = all(cell[f"_finite{i}"] for i in range(len(columns)))
        state[at] = OK if finite else NOT_FINITE
        if finite:
            values[at] = [cell[f"_value{i}"] for i in range(len(columns))]

    share = trials / np.maximum(trials.max(axis=0, initial=0), 1)
    behind = (state == OK) & (share < share.max(axis=1, initial=0, keepdims=True) - 1e-9)
    state[behind] = ABSENT
    failed = frame.filter(~done()).select("_block", "_arm").unique()
    for block, arm in failed.iter_rows():
        rows = slice(None) if block is None else row_of[block]
        cols = slice(None) if arm is None else col_of.get(arm)
        if cols is None:
            continue
        if block is None:
            part = state[:, cols]
            part[(part == ABSENT) | (part == EMPTY)] = FAILED
            state[:, cols] = part
        else:
            state[rows, cols] = FAILED
    values[state != OK] = np.nan
    return Grid(tuple(names), values, state)


def rows_by_block(
    frame: pl.DataFrame, arms_col: str, block_col: str, columns: Sequence[str], arm: str
) -> dict[str, np.ndarray]:
    """The rows of `arm` that carry all `columns`, by block: arrays (rows, columns) float64."""
    frame = numbers(with_engine_columns(frame), columns).filter(done() & (pl.col(arms_col).cast(pl.String) == arm))
    frame = frame.select(pl.col(block_col).cast(pl.String).alias("_block"), *columns).drop_nulls()
    return {key[0]: part.select(columns).to_numpy() for key, part in frame.group_by("_block", maintain_order=True)}


def sort_out(
    grid: Grid, arms: Sequence[str], subjects: int
) -> tuple[np.ndarray, dict[str, str], dict[str, str], tuple[str, ...]]:
    """Which blocks of `grid` count (bool, shape (n,)), and the broken, lost and unfinished ones.

    The first `subjects` arms are the method's side: what goes wrong there is broken, on the other arms it is lost.
    """
    broken: dict[str, str] = {}
    lost: dict[str, str] = {}
    unfinished: list[str] = []
    for name, states in zip(grid.names, grid.state, strict=True):
        why = [f"{arm} {_WHY[s]}" for arm, s in zip(arms, states, strict=True) if s in _WHY]
        if any(s in _WHY for s in states[:subjects]):
            broken[name] = "; ".join(why)
        elif why:
            lost[name] = "; ".join(why)
        elif ABSENT in states:
            unfinished.append(name)
    return (grid.state == OK).all(axis=1), broken, lost, tuple(unfinished)
