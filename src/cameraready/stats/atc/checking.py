"""Refuses parameters and samples that would spoil a detector's state, before they do."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

Scan = Literal["exact", "geometric"]
Missing = Literal["raise", "skip"]

#: Larger values could overflow in sums over a long segment.
LARGEST = 1e100
#: Fewer differences say next to nothing of a standard deviation.
LEAST_WARMUP = 8


def check_options(alpha: Any, scan: Any, threshold: Any, warmup: Any, missing: Any) -> None:
    """Raises ValueError for a parameter of `ATC` that is out of range, and says what it may be."""
    if not (is_number(alpha) and 0 < alpha < 1):
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha!r}; it bounds a probability")
    if scan not in ("exact", "geometric"):
        raise ValueError(f"scan must be 'exact' or 'geometric', got {scan!r}")
    if threshold != "anytime" and not (is_number(threshold) and threshold > 0):
        raise ValueError(f"threshold must be 'anytime' or a positive number, got {threshold!r}")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < LEAST_WARMUP:
        raise ValueError(f"warmup must be an integer of at least {LEAST_WARMUP}, got {warmup!r}")
    if missing not in ("raise", "skip"):
        raise ValueError(f"missing must be 'raise' or 'skip', got {missing!r}")


def check_values(values: np.ndarray, *, expected: int | None, nan: bool, first: int) -> None:
    """Raises ValueError where `values` (n, n_streams) has another number of streams than `expected`, or bad numbers.

    Bad are infinite ones, those above `LARGEST`, and NaN unless `nan`; `first` is the position in the stream of row 0.
    """
    if expected is not None and values.shape[1] != expected:
        raise ValueError(f"a sample has {values.shape[1]} streams, expected {expected}")
    size = np.abs(values)
    if not nan and np.isnan(size).any():
        where = int(np.flatnonzero(np.isnan(size).any(axis=1))[0])
        raise ValueError(f"sample {first + where} is NaN; missing='skip' leaves such samples out")
    if (size > LARGEST).any():
        where = int(np.flatnonzero((size > LARGEST).any(axis=1))[0])
        raise ValueError(
            f"sample {first + where} is {values[where].tolist()}; values must be finite and at most {LARGEST:g}"
        )


def is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def checked_sigma(sigma: Any) -> np.ndarray | None:
    """Standard deviations (1,) or (n_streams,), or None for those to be estimated."""
    if isinstance(sigma, str):
        if sigma == "mad":
            return None
        raise ValueError(f"sigma must be a positive number, one for each stream, or 'mad', got {sigma!r}")
    values = np.atleast_1d(np.asarray(sigma, dtype=float))
    if values.ndim != 1 or values.size == 0 or not ((values >= 1 / LARGEST) & (values <= LARGEST)).all():
        raise ValueError(
            f"sigma must be positive and finite ({1 / LARGEST:g} to {LARGEST:g}), got {sigma!r}; 'mad' estimates it"
        )
    return values


def as_array(X: Any) -> np.ndarray:
    """`X` as an array of whatever it holds; pandas' own missing values, which NumPy does not know, become NaN."""
    values = np.asarray(X)
    if values.dtype.kind == "O" and hasattr(X, "isna"):
        return np.where(np.asarray(X.isna()), np.nan, values)
    return values


def as_floats(values: np.ndarray) -> np.ndarray:
    """`values` as a C-ordered float64 array; raises TypeError for text, dates and other objects that are no numbers."""
    if values.dtype.kind not in "biufO":
        raise TypeError(f"samples must be numbers, got {values.dtype}")
    try:
        return np.ascontiguousarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"samples must be numbers, got {values.ravel()[:3].tolist()}") from error
