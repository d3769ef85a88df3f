"""Tables with text, categories, dates and missing values as numbers for any learner."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

MISSING = "missing"


@dataclass
class _Numbers:
    """A column of numbers: centre and scale, the median for missing values, and whether missing ones get a column."""

    centre: float
    scale: float
    median: float
    flagged: bool

    @classmethod
    def learnt(cls, column: np.ndarray) -> _Numbers:
        present = column[~np.isnan(column)]
        if not len(present):
            return cls(0.0, 1.0, 0.0, False)
        largest = float(np.abs(present).max()) or 1.0  # squares of huge values would overflow
        shrunk = present / largest
        spread = float(shrunk.std())
        scale = largest * spread if spread > 1e-12 else 1.0
        return cls(largest * float(shrunk.mean()), scale, float(np.median(present)), len(present) < len(column))

    def coded(self, column: np.ndarray) -> list[np.ndarray]:
        missing = np.isnan(column)
        values = np.where(missing, self.median, column) / self.scale - self.centre / self.scale  # no overflow
        return [values, missing.astype(float)] if self.flagged else [values]


@dataclass
class _Levels:
    """A column of text or categories: one 0/1 column a frequent level; rare and new levels are all zero."""

    levels: list[Hashable] = field(default_factory=list)

    @classmethod
    def learnt(cls, column: np.ndarray, most: int) -> _Levels:
        values, counts = np.unique(column.astype(str), return_counts=True)  # _column has made them text
        least = max(2, int(0.005 * len(column)))
        frequent = [(int(c), str(v)) for v, c in zip(values, counts, strict=True) if c >= least]
        frequent.sort(key=lambda pair: (-pair[0], pair[1]))
        return cls([value for _, value in frequent[:most]])

    def coded(self, column: np.ndarray) -> list[np.ndarray]:
        text = column.astype(str)
        return [(text == level).astype(float) for level in self.levels]


class TableEncoder(TransformerMixin, BaseEstimator):
    """Columns of any kind as standardised numbers.

    Numbers and dates (as days) are centred and scaled, their missing values replaced by the median and flagged in a column of
    their own; text, categories and booleans become 0/1 columns of their levels, missing being one of them.

    Parameters
    ----------
    max_levels : int
        Levels kept of a column, the most frequent ones.
    """

    def __init__(self, max_levels: int = 30) -> None:
        self.max_levels = max_levels

    def fit(self, X: Any, y: Any = None) -> TableEncoder:
        """Learn levels, centres and scales from `X` (n, n_features): array, pandas or polars frame.

        Raises
        ------
        ValueError
            For tables that are empty, not two-dimensional, or hold infinite values.
        """
        names, columns = _columns(X)
        if not columns:
            raise ValueError("the table has no columns")
        self.names_ = names
        self.n_features_in_ = len(columns)
        self.codes_ = [
            _Numbers.learnt(column) if column.dtype == float else _Levels.learnt(column, self.max_levels)
            for column in columns
        ]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """`X` with the columns of `fit`, as float64 (n, n_codes).

        Raises
        ------
        ValueError
            Where columns are missing or of another kind than in `fit`.
        """
        check_is_fitted(self)
        names, columns = _columns(X)
        if self.names_ is not None and names is not None:
            lost = [name for name in self.names_ if name not in names]
            if lost:
                raise ValueError(f"the table lacks the columns {', '.join(map(str, lost[:5]))} that were there in fit")
            columns = [columns[names.index(name)] for name in self.names_]
        if len(columns) != self.n_features_in_:
            raise ValueError(f"the table has {len(columns)} columns, {self.n_features_in_} were there in fit")
        parts: list[np.ndarray] = []
        for index, (code, column) in enumerate(zip(self.codes_, columns, strict=True)):
            if isinstance(code, _Numbers) and column.dtype != float:
                if not all(value == MISSING for value in column):
                    name = index if self.names_ is None else self.names_[index]
                    raise ValueError(f"the column {name} holds text, in fit it held numbers")
                column = np.full(len(column), np.nan)
            elif isinstance(code, _Levels) and column.dtype == float:
                column = np.array([MISSING if np.isnan(v) else _text(v) for v in column], dtype=object)
            parts += code.coded(column)
        return np.column_stack(parts) if parts else np.empty((len(columns[0]), 0))


def n_rows(table: Any) -> int:
    return table.shape[0] if hasattr(table, "shape") else len(table)


def rows_of(table: Any, rows: np.ndarray) -> Any:
    """Some rows of an array or frame, as the same kind of table."""
    if hasattr(table, "iloc"):
        return table.iloc[rows]
    return table[rows] if hasattr(table, "shape") else np.asarray(table)[rows]


def _columns(X: Any) -> tuple[list[Any] | None, list[np.ndarray]]:
    """Names (None for arrays), and columns as float64, or as object arrays of text with `MISSING` for missing values."""
    if hasattr(X, "columns"):
        names = list(X.columns)
        if len(set(names)) < len(names):
            raise ValueError("two columns of the table share a name")
        raw = [X.iloc[:, j] if hasattr(X, "iloc") else X[:, j] for j in range(len(names))]
        found = [_column(column, name) for name, column in zip(names, raw, strict=True)]
    else:
        array = X if hasattr(X, "shape") else np.array(X, dtype=object)  # rows of mixed kinds stay what they are
        array = np.asarray(array)
        if array.ndim != 2:
            raise ValueError(
                f"expected a table of shape (n, n_features), got shape {array.shape}; one column is X[:, None]"
            )
        names, found = None, [_column(column, index) for index, column in enumerate(array.T)]
    if found and not len(found[0]):
        raise ValueError("the table has no rows")
    return names, found


def _column(column: Any, name: Any) -> np.ndarray:
    is_category = type(getattr(column, "dtype", None)).__name__ in ("CategoricalDtype", "Categorical", "Enum")
    values = np.asarray(column, dtype=object) if is_category else np.asarray(column)
    if values.dtype.kind in "iuf":
        numbers = values.astype(float)
    elif values.dtype.kind in "mM":
        numbers = np.where(np.isnat(values), np.nan, values.astype(f"{values.dtype.kind}8[s]").astype(float) / 86_400.0)
    elif values.dtype.kind == "c":
        raise ValueError(f"the column {name} holds complex numbers")
    else:
        missing = np.array([_is_missing(value) for value in values.tolist()], dtype=bool)
        present = values[~missing].tolist()
        whole = bool(present) and not is_category
        if whole and all(isinstance(value, datetime.date) for value in present):
            numbers = np.full(len(values), np.nan)
            numbers[~missing] = _days(present)
        elif whole and all(_is_number(value) for value in present):
            numbers = np.full(len(values), np.nan)
            numbers[~missing] = [float(value) for value in present]
        else:
            return np.array(
                [MISSING if lost else _text(v) for v, lost in zip(values.tolist(), missing, strict=True)], dtype=object
            )
    if np.isinf(numbers).any():
        raise ValueError(f"the column {name} holds infinite values")
    return numbers


def _days(moments: list[Any]) -> np.ndarray:
    """Days since 1970 of dates and times, in UTC where they have a zone."""
    import pandas as pd

    zoned = any(getattr(moment, "tzinfo", None) is not None for moment in moments)
    found = pd.DatetimeIndex([pd.Timestamp(moment) for moment in moments])
    found = found.tz_convert("UTC").tz_localize(None) if zoned else found
    return found.to_numpy().astype("M8[s]").astype(float) / 86_400.0


def _text(value: Any) -> str:
    """The name of a level: the same for True, 1 and 1.0, which a file does not tell apart."""
    if isinstance(value, (bool, np.bool_)) or _is_number(value):
        return f"{float(value):.15g}"
    return str(value)


def _is_number(value: Any) -> bool:
    numeric = isinstance(value, (int, float, np.integer, np.floating, decimal.Decimal))
    return numeric and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas.NA has no truth value
        return type(value).__name__ == "NAType"
