"""What studies return, in the form in which it is stored: rows of plain scalars, arrays without pickle."""

from __future__ import annotations

import os
import reprlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def load_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file; objects in it are refused."""
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def save_arrays(arrays: Mapping[str, Any], path: Path) -> None:
    """Write arrays as ``.npz``, so that another process sees either all of the file or none.

    Raises
    ------
    TypeError
        Something is not an array of numbers, booleans or strings.
    """
    import numpy as np

    plain = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype.hasobject:
            raise TypeError(
                f"prepare returned {name!r} with dtype object; prepared arrays must hold numbers, booleans or strings,"
                " since they are stored without pickle"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **plain)  # type: ignore[arg-type]
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def rows_of(returned: Any) -> list[Mapping[str, Any]]:
    """What a trial returned, as rows: one for a dict, several for several, none for an empty list.

    Raises
    ------
    TypeError
        It returned anything else.
    """
    if isinstance(returned, Mapping):
        return [returned]
    what = "a trial returns a dict, or several"
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes) or getattr(returned, "shape", 0) == ():
        raise TypeError(f"the trial returned {reprlib.repr(returned)}; {what}")
    rows = list(returned)
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"the trial returned {reprlib.repr(row)} among its rows; {what}")
    return rows


def plain_rows(rows: Iterable[Mapping[str, Any]], condition: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows as the ledger keeps them: numpy and torch scalars become Python's; only numbers and text are allowed.

    Raises
    ------
    TypeError
        A value is neither None, a bool, an integer of 64 bits, a float nor a string.
    ValueError
        A column belongs to the engine, or a column contradicts the condition.
    """
    from cameraready.evidence.study import ENGINE_COLUMNS

    checked = [{str(name): _plain(str(name), value) for name, value in row.items()} for row in rows]
    for row in checked:
        for name, value in row.items():
            if name in ENGINE_COLUMNS:
                raise ValueError(
                    f"the trial returned a column {name!r}, which the engine fills itself; rename it (the engine's"
                    f" columns: {', '.join(ENGINE_COLUMNS)})"
                )
            if name in condition and not _same(value, condition[name]):
                raise ValueError(
                    f"the trial returned {name}={value!r}, but its condition says {name}={condition[name]!r}; leave the"
                    " column out or rename it"
                )
    return checked


def _plain(name: str, value: Any) -> Any:
    if type(value) in (float, str, bool, type(None)):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool | None):
        return value
    if isinstance(value, float | str):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TypeError(f"the trial returned {name}={value}, which does not fit 64 bits; return it as a float")
        return int(value)
    raise TypeError(
        f"the trial returned {name} of type {type(value).__name__}; a row holds numbers, strings, booleans and None"
        " (return several rows, or one column each, for an array)"
    )


def _same(value: Any, asked: Any) -> bool:
    return bool(value == asked) or (value != value and asked != asked)  # NaN is itself here
