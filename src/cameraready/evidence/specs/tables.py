"""Reads the user's tables; strings, categories, dates and missing values are kept, and errors are sentences."""

from __future__ import annotations

import csv
import difflib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cameraready.evidence.specs.spec import Spec, SpecError

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")
ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?")
LISTED = 12  # names of columns in a message
SIGNATURES = {
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"PK\x03\x04": "a zip archive or spreadsheet",
    b"\x1f\x8b": "compressed with gzip",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"\x89HDF": "an HDF5 file",
}


def read_table(spec: Spec) -> tuple[pd.DataFrame, pd.Series]:
    """The user's table as features and target.

    Columns keep their types. In text files numbers and booleans are recognised, empty cells and ``NA`` are missing,
    columns of ISO dates become dates, and a first column without a name is taken for row labels (what
    ``DataFrame.to_csv`` writes). A column that mixes strings and numbers becomes one of strings.

    Parameters
    ----------
    spec : Spec
        Of kind ``"table"``, with a target; or of kind ``"model"`` with ``data=`` and ``target=``.

    Returns
    -------
    X : pandas.DataFrame of shape (n_rows, n_features)
    y : pandas.Series of shape (n_rows,)
        Without missing values: rows that have none are left out, with a warning that counts them.

    Raises
    ------
    SpecError
        The file is missing, empty or not what its name says; the target is not named, not there, always missing or
        infinite; two columns share a name; a column holds lists. The message says which, and what to do.
    """
    features, roles = read_columns(spec, ["target"])
    return features, roles["target"]


def read_columns(
    spec: Spec, roles: Sequence[str], optional: Sequence[str] = ()
) -> tuple[pd.DataFrame, dict[str, pd.Series]]:
    """The user's table, with the columns that play a role taken out.

    ``read_columns(spec, ["outcome", "treatment"])`` serves ``data.parquet:outcome=spend,treatment=emailed``. Types and
    errors are those of `read_table`; rows that lack a value of one of `roles` are left out, with a warning.

    Parameters
    ----------
    spec : Spec
        Of kind ``"table"``, or ``"model"`` with ``data=``.
    roles, optional : sequence of str
        Roles that the study needs, and those that the user may name beside them.

    Returns
    -------
    features : pandas.DataFrame of shape (n_rows, n_features)
    columns : dict of role to pandas.Series of shape (n_rows,)
    """
    table = spec.data if spec.kind == "model" else spec
    if table is None:
        raise SpecError(f"{spec.name} comes without rows; name them as {spec.name}:data=rows.csv,target=COLUMN")
    frame = read_file(table.path)
    named = {**({"target": table.target} if table.target else {}), **table.options}
    check_roles(table.name, frame, named, roles, optional)
    chosen = {role: find_column(frame, column, table.name) for role, column in named.items()}
    twice = [column for column in chosen.values() if list(chosen.values()).count(column) > 1]
    if twice:
        raise SpecError(f"the column {twice[0]!r} of {table.name} is named for two roles")
    for role in roles:
        check_values(frame[chosen[role]], f"the {role} {chosen[role]!r} of {table.name}")
    complete = frame[[chosen[role] for role in roles]].notna().all(axis=1)
    if not complete.all():
        missing = int((~complete).sum())
        words = " or ".join(chosen[role] for role in roles)
        warnings.warn(f"{missing} of {len(frame)} rows of {table.name} have no {words} and are left out", stacklevel=2)
        frame = frame[complete].reset_index(drop=True)
    features = frame.drop(columns=list(chosen.values()))
    if features.shape[1] == 0:
        raise SpecError(f"{table.name} has no column beside {', '.join(chosen.values())}")
    return features, {role: frame[column] for role, column in chosen.items()}


def read_file(path: str) -> pd.DataFrame:
    """The whole table in the file at `path`, with text as column names."""
    needs("pandas", "reading tables")
    import pandas as pd

    suffix = path[path.rindex(".") :].lower()
    try:
        if suffix == ".parquet":
            needs("pyarrow", "reading .parquet")
            import pyarrow.parquet

            check_names(path, pyarrow.parquet.read_schema(path).names)
            frame = pd.read_parquet(path, engine="pyarrow")
        elif suffix == ".jsonl":
            frame = read_json_lines(path)
        else:
            frame = read_delimited(path, "\t" if suffix == ".tsv" else ",")
    except SpecError:
        raise
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the readers raise many types; all of them mean that the file is not what it should be
        reason = str(error).strip().partition("\n")[0]
        raise SpecError(f"{path} cannot be read as {suffix}: {reason}") from error
    if suffix == ".parquet" and any(frame.index.names):
        frame = frame.reset_index()
    frame.columns = pd.Index([str(column) for column in frame.columns])
    check_names(path, list(frame.columns))
    if len(frame) == 0:
        raise SpecError(f"{path} has no rows")
    return frame.assign(**{name: settle_types(frame[name], path) for name in frame.columns})


def read_delimited(path: str, separator: str) -> pd.DataFrame:
    import pandas as pd

    check_text(path)
    with open(path, encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter=separator), [])
    if len(header) == 1 and header[0].count(";") > 0:
        raise SpecError(f"{path} is separated by semicolons; save it with commas (and points as decimal marks)")
    check_names(path, header)  # pandas would rename the second of two equal names
    labels = 0 if header and not header[0].strip() else False
    # low_memory=False: types are those of whole columns, not of chunks.
    frame = pd.read_csv(path, sep=separator, encoding="utf-8-sig", index_col=labels, low_memory=False)
    return frame.reset_index(drop=True)


def read_json_lines(path: str) -> pd.DataFrame:
    """One JSON object a line. Not by `pandas.read_json`, which turns "007" into 7 and guesses dates from names."""
    import pandas as pd

    check_text(path)
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                raise SpecError(f"line {number} of {path} is not a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise SpecError(f"line {number} of {path} is not a JSON object, but a {type(row).__name__}")
            rows.append(row)
    return pd.DataFrame.from_records(rows)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"several values are named {listed(sorted({name for name in names if names.count(name) > 1}))}"
        )
    return row


def check_text(path: str) -> None:
    """Refuse what is not UTF-8 text, whatever its name ends with."""
    with open(path, "rb") as file:
        start = file.read(65536)
        if not start.strip():
            raise SpecError(f"{path} is empty")
        for signature, what in SIGNATURES.items():
            if start.startswith(signature):
                raise SpecError(f"{path} is {what} under a wrong name; it is read as text only")
        if b"\0" in start:
            raise SpecError(f"{path} is binary, not a table in text")
    try:
        with open(path, encoding="utf-8") as text:
            while text.read(1 << 20):
                pass
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SpecError(f"{path} is not UTF-8 text (byte 0x{byte:02x}); save it as UTF-8") from None


def check_names(path: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise SpecError(f"{path} has several columns named {listed(twice)}; give each its own name")
    blank = [place for place, name in enumerate(names) if not name.strip() and place > 0]
    if blank:
        raise SpecError(f"column {blank[0] + 1} of {path} has no name")


def check_roles(
    file: str, frame: pd.DataFrame, named: Mapping[str, str], roles: Sequence[str], optional: Sequence[str]
) -> None:
    known = [*roles, *optional]
    for role in named:
        if role not in known:
            near = difflib.get_close_matches(role, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise SpecError(
                f"{role}= means nothing to this study, which takes {', '.join(f'{name}=' for name in known)}{hint}"
            )
    missing = [role for role in roles if role not in named]
    if missing == ["target"]:
        raise SpecError(f"name the column to predict: {file}:COLUMN; the columns are {listed(frame.columns)}")
    if missing:
        form = ",".join(f"{role}=COLUMN" for role in roles)
        raise SpecError(
            f"name the column of {' and '.join(missing)}: {file}:{form}; the columns are {listed(frame.columns)}"
        )


def find_column(frame: pd.DataFrame, wanted: str, file: str) -> str:
    """`wanted` if the table has it; names that differ in case or spelling are suggested, not taken."""
    names = list(frame.columns)
    if wanted in names:
        return wanted
    folded = {name.strip().casefold(): name for name in names}
    near = [folded[match] for match in difflib.get_close_matches(wanted.strip().casefold(), folded, n=3)]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; the columns are {listed(names)}"
    raise SpecError(f"{file} has no column {wanted[: LISTED * 10]!r}{hint}")


def check_values(column: pd.Series, what: str) -> None:
    import numpy as np

    if column.isna().all():
        raise SpecError(f"{what} is missing in every row")
    if column.dtype.kind == "f" and np.isinf(column.to_numpy()).any():
        raise SpecError(f"{what} has infinite values")


def settle_types(column: pd.Series, path: str) -> pd.Series:
    """Columns of ISO dates as dates, columns of mixed types as strings, everything else as it is."""
    import numpy as np
    import pandas as pd

    if not (pd.api.types.is_object_dtype(column.dtype) or pd.api.types.is_string_dtype(column.dtype)):
        return column
    values = column.dropna()
    kinds = {type(value) for value in values}
    nested = [kind for kind in kinds if issubclass(kind, (list, dict, tuple, set, np.ndarray))]
    if nested:
        raise SpecError(
            f"the column {column.name!r} of {path} holds {nested[0].__name__} values; make a column of each part"
        )
    if kinds == {str}:
        # The first values decide cheaply for nearly all columns of text.
        if len(values) and all(ISO_DATE.fullmatch(value) for value in values.head(20)):
            try:
                return pd.to_datetime(column, format="ISO8601")
            except (ValueError, TypeError):
                return column  # some later value is no date, so this is text
        return column
    if len(kinds) > 1 and str in kinds:
        return column.map(str, na_action="ignore")
    return column


def listed(names: Any) -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def needs(library: str, purpose: str) -> None:
    """Say which extra to install where `library` is missing."""
    import importlib.util

    if importlib.util.find_spec(library) is None:
        raise SpecError(f'{purpose} needs {library}: pip install "cameraready[formats]"')
