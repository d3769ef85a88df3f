"""Reads the user's prompts, with the answers that go with them, from .jsonl, .csv, .tsv and .parquet."""

from __future__ import annotations

import csv
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Prompt = tuple[str, str | None]
Cells = dict[str, Any]


def read_prompts(path: str, columns: Sequence[str] = ()) -> list[Prompt]:
    """Prompts and answers of a file, in its order.

    Parameters
    ----------
    path : str
        Ends in ``.jsonl`` (an object a line), ``.csv``, ``.tsv`` or ``.parquet``. Text is UTF-8, with or without a byte-order mark.
    columns : sequence of str
        The column of the prompts and, if there are answers, theirs. By default ``prompt`` and, where it is there, ``answer``.

    Returns
    -------
    list of (prompt, answer)
        Prompts are strings as they stand in the file; answers are strings (of numbers, as JSON writes them), None where no column of
        answers was named.

    Raises
    ------
    SpecError
        A sentence: the file is missing, empty or broken (with the line), a column is not there (with near misses), a prompt is
        empty or no text, or an answer is missing.
    """
    from cameraready.evidence import SpecError

    if len(columns) > 2:
        raise SpecError(f"prompts have a column of prompts and one of answers, but {', '.join(columns)} were named")
    if len(set(columns)) < len(columns):
        raise SpecError(f"the column {columns[0]!r} is named for prompts and for answers")
    suffix = Path(path).suffix.lower()
    readers = {".jsonl": _json_lines, ".csv": _delimited, ".tsv": _delimited, ".parquet": _parquet}
    if suffix not in readers:
        raise SpecError(f"prompts are read from {', '.join(readers)}, not from {path}")
    try:
        rows = list(readers[suffix](path))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    if not rows:
        raise SpecError(f"{path} has no rows")
    known = list(dict.fromkeys(name for _, cells in rows for name in cells))
    prompt, *answers = columns or (["prompt", "answer"] if "answer" in known else ["prompt"])
    for name in (prompt, *answers):
        if name not in known:
            raise SpecError(f"{path} has no column {name!r}{_near(name, known)}")
    return [
        (_prompt(cells.get(prompt), place, path), _answer(cells.get(answers[0]), place, path) if answers else None)
        for place, cells in rows
    ]


def _prompt(found: Any, place: str, path: str) -> str:
    from cameraready.evidence import SpecError

    if found is None:
        raise SpecError(f"{place} of {path} has no prompt")
    if not isinstance(found, str):
        hint = (
            "; write the text of the turn, the model's chat template is put around it"
            if isinstance(found, list)
            else ""
        )
        raise SpecError(f"the prompt in {place} of {path} is no text but {_kind(found)}{hint}")
    if not found.strip():
        raise SpecError(f"the prompt in {place} of {path} is empty")
    return found


def _answer(found: Any, place: str, path: str) -> str:
    from cameraready.evidence import SpecError

    if found is None or (isinstance(found, str) and not found.strip()):
        raise SpecError(f"{place} of {path} has no answer; leave the column of answers out if prompts need none")
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        raise SpecError(f"the answer in {place} of {path} is neither text nor a number but {_kind(found)}")
    return found if isinstance(found, str) else json.dumps(found)


def _kind(found: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(found), f"a {type(found).__name__}")


def _near(name: str, known: Sequence[str]) -> str:
    from cameraready.evidence.specs.tables import listed

    folded = {other.strip().casefold(): other for other in known}
    near = [folded[match] for match in difflib.get_close_matches(name.strip().casefold(), folded, n=3)]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; the columns are {listed(known)}"


# --- kinds of file ---------------------------------------------------------------------------------------------------


def _json_lines(path: str) -> Iterator[tuple[str, Cells]]:
    from cameraready.evidence import SpecError
    from cameraready.evidence.specs.tables import check_text, unique_keys

    check_text(path)
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                cells = json.loads(line, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                raise SpecError(
                    f"line {number} of {path} is not a JSON object ({error}); each line must be one"
                ) from None
            if not isinstance(cells, dict):
                raise SpecError(
                    f"line {number} of {path} is not a JSON object but {_kind(cells)}; each line must be one"
                )
            yield f"line {number}", cells


def _delimited(path: str) -> Iterator[tuple[str, Cells]]:
    from cameraready.evidence import SpecError
    from cameraready.evidence.specs.tables import check_names, check_text

    check_text(path)
    longest = csv.field_size_limit(sys.maxsize)  # the default refuses prompts of over 131,072 characters
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True)
            header = next(reader, [])
            if len(header) == 1 and ";" in header[0]:
                raise SpecError(f"{path} is separated by semicolons; save it with commas")
            check_names(path, header)
            while True:
                begin = reader.line_num + 1
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise SpecError(f"line {begin} of {path} cannot be read: {error}") from None
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise SpecError(
                        f"line {begin} of {path} has {len(cells)} cells, its first line names {len(header)} columns; put cells that "
                        "hold separators in quotes"
                    )
                yield f"line {begin}", dict(zip(header, cells, strict=True))
    finally:
        csv.field_size_limit(longest)


def _parquet(path: str) -> Iterator[tuple[str, Cells]]:
    import polars as pl

    from cameraready.evidence import SpecError

    try:
        frame = pl.read_parquet(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # its readers raise many types; all of them mean that the file is not what it should be
        raise SpecError(f"{path} cannot be read as .parquet: {str(error).strip().partition(chr(10))[0]}") from error
    for number, cells in enumerate(frame.iter_rows(named=True), 1):
        yield f"row {number}", cells
