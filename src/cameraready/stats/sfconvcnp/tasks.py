"""Tasks, one a series: read from pairs of arrays or a long table, split at random into context and targets, padded."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Tasks of different size side by side: points beyond a task's own are masked.

    Attributes
    ----------
    xc, yc, mask_c : Tensor (B, N, dim_x), (B, N, dim_y), bool (B, N)
        The context.
    xt, yt, mask_t : Tensor (B, T, dim_x), (B, T, dim_y), bool (B, T)
        The targets; NaN among `yt` is a missing output.
    """

    xc: Tensor
    yc: Tensor
    mask_c: Tensor
    xt: Tensor
    yt: Tensor
    mask_t: Tensor

    def log_likelihood(self, prediction: torch.distributions.Normal) -> Tensor:
        """Mean log-likelihood of an observed target output, for every task: (B,)."""
        there = self.mask_t[..., None] & ~torch.isnan(self.yt)
        each = prediction.log_prob(torch.where(there, self.yt, 0))
        return torch.where(there, each, 0).sum((1, 2)) / there.sum((1, 2)).clamp(min=1)


def padded(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Arrays (n_i, d) of different length as one tensor (B, max n, d), zero beyond their end, and the mask (B, max n)."""
    longest = max((len(array) for array in arrays), default=0)
    out = torch.zeros(len(arrays), longest, arrays[0].shape[1], dtype=dtype)
    mask = torch.zeros(len(arrays), longest, dtype=torch.bool)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = torch.as_tensor(array, dtype=dtype)
        mask[i, : len(array)] = True
    return out, mask


def batch_of(splits: Sequence[tuple[np.ndarray, ...]], dtype: torch.dtype = torch.float32) -> Batch:
    """Splits (xc, yc, xt, yt) as one batch; inputs stay in float64 for the subtraction of each task's middle."""
    xc, yc, xt, yt = zip(*splits, strict=True)
    values_c, mask_c = padded(yc, dtype)
    values_t, mask_t = padded(yt, dtype)
    return Batch(padded(xc, torch.float64)[0], values_c, mask_c, padded(xt, torch.float64)[0], values_t, mask_t)


def random_splits(
    tasks: Sequence[tuple[np.ndarray, np.ndarray]],
    batch_size: int,
    smallest: int,
    largest: int | None,
    targets: int,
    generator: np.random.Generator,
) -> Iterator[Batch]:
    """Batches without end: tasks drawn with replacement, each with a context of random size and up to `targets` others."""
    while True:
        splits = []
        for index in generator.integers(len(tasks), size=batch_size):
            x, y = tasks[index]
            most = min(len(x) - 1, largest if largest is not None else len(x) - 1)
            size = int(generator.integers(min(smallest, most), most + 1))
            order = generator.permutation(len(x))
            context, rest = order[:size], order[size : size + targets]
            splits.append((x[context], y[context], x[rest], y[rest]))
        yield batch_of(splits)


def read_tasks(tasks: Any, columns: tuple[str, Sequence[str], Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tasks as pairs of float64 arrays (n, dim_x) and (n, dim_y), from pairs or from a long table.

    Raises
    ------
    ValueError
        No task, pairs whose lengths or dimensions differ, inputs that are not finite, columns that are not there.
    """
    if hasattr(tasks, "columns"):
        pairs = list(_from_table(tasks, *columns))
    else:
        pairs = []
        for task in tasks:
            if not isinstance(task, tuple | list) or len(task) != 2:
                raise ValueError("tasks must be a table, or a list of pairs (x, y)")
            pairs.append((task[0], task[1]))
    if not pairs:
        raise ValueError("there are no tasks to learn from")
    read = [read_points(x, y, f"task {i}") for i, (x, y) in enumerate(pairs)]
    shapes = {(x.shape[1], y.shape[1]) for x, y in read}
    if len(shapes) > 1:
        raise ValueError(f"tasks differ in their dimensions (inputs, outputs): {sorted(shapes)}")
    return read


def read_points(x: Any, y: Any, name: str = "context") -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, dim_x) and outputs (n, dim_y) in float64; vectors are taken for one column, dates for days."""
    inputs, outputs = read_inputs(x, name), _columns(y, name)
    if len(inputs) != len(outputs):
        raise ValueError(f"{name} has {len(inputs)} inputs and {len(outputs)} outputs")
    if np.isinf(outputs).any():
        raise ValueError(f"{name} has an infinite output; a missing one is NaN")
    return inputs, outputs


def read_inputs(x: Any, name: str = "x") -> np.ndarray:
    """Finite inputs (n, dim_x) in float64."""
    inputs = _columns(x, name)
    if not np.isfinite(inputs).all():
        raise ValueError(f"{name} has inputs that are not finite; leave points without a position out")
    return inputs


def _columns(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype == object:
        array = _dates(array)
    if array.dtype.kind in "mM":
        array = _days(array)
    if array.dtype.kind not in "fiub":
        try:
            array = np.asarray(array, dtype=np.float64) if array.dtype.kind != "c" else None
        except (TypeError, ValueError):
            array = None
        if array is None:
            raise ValueError(
                f"{name} must hold numbers or dates, got {np.asarray(values).dtype}; dates as text become dates by pandas.to_datetime"
            )
    array = array.astype(np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(f"{name} must have the shape (points,) or (points, dimensions), got {array.shape}")
    return array


def _dates(array: np.ndarray) -> np.ndarray:
    """Objects of Python's and pandas' date and time types as datetime64, in UTC where they have a zone; others as they came."""
    found = next((value for value in array.ravel() if value is not None), None)
    if not isinstance(found, datetime.date):
        return array
    import pandas as pd

    moments = pd.to_datetime(array.ravel(), utc=getattr(found, "tzinfo", None) is not None)
    return np.asarray(moments.tz_localize(None) if moments.tz is not None else moments).reshape(array.shape)


def _days(array: np.ndarray) -> np.ndarray:
    """Days since 1970, or days of a duration, at the array's own resolution; NaN for a date that is none."""
    kind, resolution = array.dtype.kind, np.datetime_data(array.dtype)[0]
    if resolution in ("Y", "M", "generic"):  # of no fixed length
        array = array.astype(f"{kind}8[D]")
    whole = array.astype(f"{kind}8[D]")
    rest = array - whole
    days = whole.astype(np.int64) + rest / np.timedelta64(1, "D")
    return np.where(np.isnat(array), np.nan, days)


def _from_table(table: Any, series: str, inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    inputs, outputs = ([names] if isinstance(names, str) else names for names in (inputs, outputs))
    absent = [name for name in (series, *inputs, *outputs) if name not in table.columns]
    if absent:
        raise ValueError(
            f"the table has no column {', '.join(map(repr, absent))}; it has {', '.join(map(str, table.columns))}. Name them with"
            " columns=(series, [inputs], [outputs])"
        )
    keys = np.asarray(table[series])
    unnamed = sum(key is None or key != key for key in keys.tolist())
    if unnamed:
        raise ValueError(f"{unnamed} rows name no series (column {series!r}); leave them out, or name it")
    keys = keys.astype(str)
    x = np.column_stack([_columns(table[name], name) for name in inputs])
    y = np.column_stack([_columns(table[name], name) for name in outputs])
    for key in dict.fromkeys(keys.tolist()):
        mine = keys == key
        yield x[mine], y[mine]
