"""Tables as the rank tests need them: one covariance matrix for each domain or window of time, with every defect named."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

#: Rows of the shortest window of time, and rows for each column that it must have.
SHORTEST_WINDOW, ROWS_PER_COLUMN = 60, 8
#: Level at which neighbouring windows still pass for alike, and permutations that decide it.
HOMOGENEITY_LEVEL, PERMUTATIONS = 0.01, 199


@dataclass(frozen=True)
class Domains:
    """What is kept of the rows.

    Attributes
    ----------
    names : tuple of str, length p
    labels : tuple, length C
        One label a domain; for windows of time pairs (domain, number of the window) or the number alone.
    covariances : float64 array of shape (C, p, p)
        Of every domain around its own means, divisor rows - 1, in units of `scales`.
    rows : int array of shape (C,)
    scales : float64 array of shape (p,)
        Pooled standard deviation within domains, in the units of the data.
    """

    names: tuple[str, ...]
    labels: tuple[Any, ...]
    covariances: np.ndarray
    rows: np.ndarray
    scales: np.ndarray

    @property
    def correlations(self) -> np.ndarray:
        """(C, p, p); a column that is constant in a domain has correlation zero with all others there."""
        deviations = np.sqrt(np.einsum("cii->ci", self.covariances))
        usable = np.where(deviations > 1e-9, deviations, 1.0)
        found = self.covariances / (usable[:, :, None] * usable[:, None, :])
        constant = deviations <= 1e-9
        found[constant[:, :, None] | constant[:, None, :]] = 0.0
        diagonal = np.arange(len(self.names))
        found[:, diagonal, diagonal] = 1.0
        return found

    def pooled(self) -> Domains:
        """All domains as one, each around its own means."""
        weights = (self.rows - 1)[:, None, None]
        covariance = (weights * self.covariances).sum(axis=0) / weights.sum()
        return Domains(self.names, ("pooled",), covariance[None], np.array([(self.rows - 1).sum() + 1]), self.scales)


def read_matrix(X: Any, missing: Literal["error", "drop"] = "error") -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """A table as numbers: values (n, p) float64, column names, and which of the rows given were kept (boolean).

    Raises
    ------
    ValueError
        Not two-dimensional, fewer than two columns or three rows, text or categories, infinite values, two columns of one name,
        missing values (unless `missing` is ``"drop"``, which leaves their rows out with a warning).
    TypeError
        A sparse matrix.
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop', got {missing!r}")
    if hasattr(X, "toarray"):
        raise TypeError("sparse data are not supported; pass a dense array, X.toarray()")
    if np.ndim(X) != 2:
        raise ValueError(f"expected a table of shape (rows, columns), got {np.ndim(X)} dimension(s)")
    names = tuple(str(name) for name in X.columns) if hasattr(X, "columns") else ()
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"several columns are named {', '.join(twice)}; give each its own name")
    values = _numbers(X, names)
    n, p = values.shape
    names = names or tuple(f"x{i + 1}" for i in range(p))
    for count, what, least in ((p, "feature(s)", 2), (n, "sample(s)", 3)):
        if count < least:
            raise ValueError(f"{count} {what} (shape={values.shape}) while a minimum of {least} is required.")
    if np.isinf(values).any():
        raise ValueError(f"the column {names[int(np.isinf(values).any(axis=0).argmax())]!r} has infinite values")
    complete = ~np.isnan(values).any(axis=1)
    if not complete.all():
        where = [name for name, bad in zip(names, np.isnan(values).any(axis=0), strict=True) if bad]
        if missing == "error":
            raise ValueError(
                f"{n - int(complete.sum())} of {n} rows have missing values (NaN, columns {_listed(where)}); impute them, or pass"
                f" missing='drop' to leave those rows out"
            )
        warnings.warn(f"{n - int(complete.sum())} of {n} rows have missing values and are left out", stacklevel=3)
    return values[complete], names, complete


def _numbers(X: Any, names: Sequence[str]) -> np.ndarray:
    for place, name in enumerate(names):
        column = np.asarray(X.iloc[:, place] if hasattr(X, "iloc") else X[name])
        if column.dtype.kind not in "fiub":
            raise ValueError(
                f"the column {name!r} holds {column.dtype} values; rank tests need numbers: leave it out, or pass it as domain"
            )
    values = np.asarray(X.to_numpy() if names else X)
    if values.dtype.kind == "c":
        raise ValueError("Complex data not supported: rank tests need real numbers")
    try:
        return values.astype(float)
    except ValueError as error:
        raise ValueError(f"expected numbers, got an array of {values.dtype} ({error})") from None


def split_rows(n: int, domain: Any, time: Any, kept: np.ndarray) -> tuple[list[tuple[Any, np.ndarray]], bool]:
    """Rows of each domain, in the order of time where one is given: ([(label, indices)], whether time was given)."""
    labels = np.zeros(n, dtype=int) if domain is None else _column(domain, kept, "domain")
    order = np.arange(n)
    if time is not None:
        moments = _column(time, kept, "time")
        if any(isinstance(moment, str) for moment in moments.tolist()):
            raise ValueError(
                "time must be numbers or dates; text does not sort as time (pandas.to_datetime converts it)"
            )
        order = np.argsort(moments, kind="stable")
    found = []
    for label in _sorted_labels(labels):
        rows = order[labels[order] == label]
        if len(rows) < 3:
            warnings.warn(f"the domain {label!r} has {len(rows)} row(s) and is left out", stacklevel=4)
            continue
        found.append((label, rows))
    if not found:
        raise ValueError("no domain has three rows; give fewer domains")
    return found, time is not None


def _column(values: Any, kept: np.ndarray, what: str) -> np.ndarray:
    column = np.asarray(values)
    if column.ndim != 1 or len(column) != len(kept):
        raise ValueError(f"{what} must have one value for each of the {len(kept)} rows, got shape {column.shape}")
    column = column[kept]
    absent = [value is None or type(value).__name__ == "NAType" or value != value for value in column.tolist()]
    if any(absent):
        raise ValueError(f"{sum(absent)} rows have no {what}; leave them out or give them one")
    return column


def _sorted_labels(labels: np.ndarray) -> list[Any]:
    """Distinct labels, sorted where they can be compared, so that the order of rows does not matter."""
    distinct = list(dict.fromkeys(labels.tolist()))
    try:
        return sorted(distinct)
    except TypeError:
        return sorted(distinct, key=lambda label: (type(label).__name__, str(label)))


def summarise(
    X: Any,
    domain: Any = None,
    time: Any = None,
    windows: int | Literal["auto"] = "auto",
    missing: Literal["error", "drop"] = "error",
) -> Domains:
    """The covariance of every domain; with `time`, of every window of consecutive rows within every domain.

    Parameters
    ----------
    X : array or data frame of shape (n, p)
    domain, time : array-like of shape (n,), optional
    windows : int or "auto"
        Rows of a window. ``"auto"`` starts at 60 rows (or 8 a column) and doubles as long as the correlation matrices of
        the windows pass a permutation test of homogeneity at 0.01.

    Raises
    ------
    ValueError
        As `read_matrix`; also labels that do not fit, columns that are constant in every domain, and linearly dependent columns.
    """
    values, names, kept = read_matrix(X, missing)
    groups, timed = split_rows(len(values), domain, time, kept)
    scaled, scales = _centred_and_scaled(values, groups, names)
    if timed:
        groups = _windows(scaled, groups, windows, len(names))
    covariances = np.stack([np.cov(scaled[rows], rowvar=False) for _, rows in groups])
    found = Domains(
        names, tuple(label for label, _ in groups), covariances, np.array([len(rows) for _, rows in groups]), scales
    )
    _refuse_dependent_columns(found)
    return found


def _centred_and_scaled(
    values: np.ndarray, groups: Sequence[tuple[Any, np.ndarray]], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Values around the means of their domain over the pooled standard deviation; huge values do not overflow."""
    used = np.concatenate([rows for _, rows in groups])
    size = np.abs(values[used]).max(axis=0)
    size[size == 0] = 1.0
    centred = values / size
    for _, rows in groups:
        centred[rows] -= centred[rows].mean(axis=0)
    deviations = np.sqrt((centred[used] ** 2).sum(axis=0) / max(len(used) - len(groups), 1))
    constant = [name for name, deviation in zip(names, deviations, strict=True) if deviation < 1e-10]
    if constant:
        where = "in every domain" if len(groups) > 1 else "in all rows"
        raise ValueError(
            f"the column(s) {_listed(constant)} are constant {where} and relate to nothing; leave them out"
        )
    return centred / deviations, deviations * size


def _refuse_dependent_columns(domains: Domains) -> None:
    from scipy.linalg import qr

    pooled = domains.pooled()
    if pooled.rows[0] - 1 < len(domains.names):
        return  # too few rows to tell
    correlation = pooled.correlations[0]
    if np.linalg.eigvalsh(correlation)[0] > 1e-10:
        return
    _, triangular, order = qr(correlation, pivoting=True)
    dependent = [domains.names[order[i]] for i in np.nonzero(np.abs(np.diag(triangular)) < 1e-9)[0]] or [
        domains.names[order[-1]]
    ]
    raise ValueError(
        f"the column(s) {_listed(dependent)} are linear combinations of the others within domains (copies, sums or scores of"
        f" other columns); leave them out"
    )


# --- windows of time ------------------------------------------------------------------------------------------------


def _windows(
    scaled: np.ndarray, groups: Sequence[tuple[Any, np.ndarray]], windows: int | Literal["auto"], p: int
) -> list[tuple[Any, np.ndarray]]:
    if windows == "auto":
        length = stable_window([scaled[rows] for _, rows in groups], max(SHORTEST_WINDOW, ROWS_PER_COLUMN * p))
    elif isinstance(windows, (int, np.integer)) and not isinstance(windows, bool) and windows >= 3:
        length = int(windows)
    else:
        raise ValueError(f"windows must be 'auto' or a number of rows of at least 3, got {windows!r}")
    alone = len(groups) == 1
    return [
        (number if alone else (label, number), part)
        for label, rows in groups
        for number, part in enumerate(cut(rows, length))
    ]


def cut(rows: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """`rows` in consecutive parts of at least `length` (or all of them), as equal as can be."""
    yield from np.array_split(rows, max(len(rows) // length, 1))


def stable_window(series: Sequence[np.ndarray], shortest: int) -> int:
    """The longest of the lengths `shortest` times 1, 2, 4 ... up to which windows are not told apart.

    Parameters
    ----------
    series : sequence of float64 arrays (n_i, p)
        Rows in the order of time.
    shortest : int

    Returns
    -------
    int
        A length at which the correlation matrices of the windows, compared by the squared distance from their mean, still look as
        they do when the rows are shuffled (199 permutations, 0.01); the shortest one where even that fails.
    """
    longest = max(len(rows) for rows in series)
    length = shortest
    while 2 * length <= longest and _alike(series, length):
        length *= 2
    return length


def _alike(series: Sequence[np.ndarray], length: int) -> bool:
    generator = np.random.default_rng(0)
    observed = sum(_spread(rows, length) for rows in series)
    above = sum(
        sum(_spread(rows[generator.permutation(len(rows))], length) for rows in series) >= observed
        for _ in range(PERMUTATIONS)
    )
    return (1 + above) / (1 + PERMUTATIONS) > HOMOGENEITY_LEVEL


def _spread(rows: np.ndarray, length: int) -> float:
    parts = [part - part.mean(axis=0) for part in cut(rows, length)]
    if len(parts) < 2:
        return 0.0
    covariances = np.stack([part.T @ part / (len(part) - 1) for part in parts])
    deviations = np.sqrt(np.maximum(np.einsum("cii->ci", covariances), 1e-12))
    correlations = covariances / (deviations[:, :, None] * deviations[:, None, :])
    return float(((correlations - correlations.mean(axis=0)) ** 2).sum())


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
