"""Numpy arrays, pandas and polars frames as the tables that a model is asked about, columns and dtypes kept."""

from __future__ import annotations

from typing import Any

import numpy as np


class Pool:
    """The explained row on top of the background, column by column, from which mixed tables are gathered."""

    def __init__(self, row: Any, background: Any) -> None:
        kind = kind_of(background)
        if kind != "numpy":
            row = _one_row_frame(row, background, kind)
            table = stacked(row, background)
            names = list(background.columns)
            self.n_features = len(names)
            n_rows = len(table)
        else:
            background = np.asarray(background)
            row = np.atleast_2d(np.asarray(row))
            if background.ndim != 2:
                raise ValueError(f"the background must have shape (rows, n_features), got {background.shape}")
            if len(row) != 1 or row.shape[1] != background.shape[1]:
                raise ValueError(
                    f"the explained row has shape {row.shape}, but the background has {background.shape[1]} features"
                )
            table = np.concatenate([row, background])
            self.n_features, n_rows = table.shape[1], len(table)
        self.n_background = n_rows - 1
        if self.n_background == 0:
            raise ValueError("the background is empty; it needs at least one row that absent features are taken from")
        self._kind, self._table = kind, table
        width = table.itemsize * self.n_features if kind == "numpy" else 16 * self.n_features
        self.row_bytes = max(1, width)

    def mixed(self, coalitions: np.ndarray) -> Any:
        """The table of all (coalition, background row) pairs: m x b rows, those of one coalition together."""
        m, b = len(coalitions), self.n_background
        if self._kind == "numpy":
            mixed = np.where(coalitions[:, None, :], self._table[0], self._table[1:])
            return mixed.reshape(m * b, self.n_features)
        absent = np.arange(1, b + 1)
        picks = (np.where(column[:, None], 0, absent).ravel() for column in coalitions.T)
        if self._kind == "polars":
            import polars

            return polars.DataFrame([column.gather(pick) for column, pick in zip(self._table, picks, strict=True)])
        import pandas

        columns = [self._table.iloc[:, j].array.take(pick) for j, pick in enumerate(picks)]
        frame = pandas.DataFrame(dict(enumerate(columns)))
        frame.columns = self._table.columns
        return frame


def kind_of(table: Any) -> str:
    module = type(table).__module__.partition(".")[0]
    if module in ("pandas", "polars") and hasattr(table, "columns"):  # a frame, not a series
        return module
    return "numpy"


def _one_row_frame(row: Any, background: Any, kind: str) -> Any:
    """The explained row as a frame of the background's library; a series or a sequence takes the background's columns."""
    if kind_of(row) != kind:
        import pandas

        values = row.tolist() if hasattr(row, "tolist") else list(row)
        values = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        if len(values) != len(background.columns):
            raise ValueError(
                f"the explained row has {len(values)} features, but the background has {len(background.columns)}"
            )
        names = list(row.index) if type(row).__name__ == "Series" else list(background.columns)
        row = pandas.DataFrame([values], columns=names)
        if kind == "polars":
            import polars

            row = polars.from_pandas(row)
    if len(row) != 1:
        raise ValueError(f"one row is explained at a time, got {len(row)}")
    return row


def stacked(rows: Any, background: Any) -> Any:
    """`rows` on top of `background`, two frames of one library, with the background's columns, order and dtypes.

    Numbers are widened where one side needs it (integers beside missing values); categories are united, the background's
    first, also with text in the place of categories.

    Raises
    ------
    ValueError
        If the columns differ.
    """
    names, wanted = list(rows.columns), list(background.columns)
    if names != wanted:
        missing = [name for name in wanted if name not in names]
        extra = [name for name in names if name not in wanted]
        if missing or extra:
            raise ValueError(
                f"the rows to explain and the background have different columns: missing {missing[:5]}, unexpected {extra[:5]}"
            )
        rows = rows[wanted]
    if kind_of(background) == "polars":
        import polars

        return polars.concat([rows, background], how="vertical_relaxed", rechunk=True)
    import pandas

    columns = []
    for j in range(len(wanted)):
        top, bottom = rows.iloc[:, j], background.iloc[:, j]
        if isinstance(bottom.dtype, pandas.CategoricalDtype):
            own, known = top.dtype, bottom.dtype.categories
            used = own.categories if isinstance(own, pandas.CategoricalDtype) else top.dropna().unique()
            new = [value for value in used if value not in known]
            both = known.append(pandas.Index(new)) if new else known
            dtype = pandas.CategoricalDtype(both, ordered=bottom.dtype.ordered)
            top, bottom = top.astype(dtype), bottom.astype(dtype)
        elif top.isna().all():
            # An all-missing column says nothing about its dtype and must not widen the background's text or dates.
            top = bottom.iloc[:0].reindex(range(len(top)))
        columns.append(pandas.concat([top.reset_index(drop=True), bottom.reset_index(drop=True)], ignore_index=True))
    table = pandas.concat(columns, axis=1, ignore_index=True)
    table.columns = background.columns
    return table


def taken(table: Any, rows: Any) -> Any:
    """The given rows of a numpy array or frame, as the same kind of table."""
    return table.iloc[list(rows)] if hasattr(table, "iloc") else table[list(rows)]
