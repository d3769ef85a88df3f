"""What ``--on`` and ``--with`` accept: text is understood here, and the user's tables, models and objects are opened.

Nothing is ever unpickled, and understanding a spec runs none of the user's code; `load_object` imports the module that
the user names, and nothing else.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cameraready.evidence.specs.model_files import MODEL_SUFFIXES, open_model
from cameraready.evidence.specs.spec import Spec, SpecError
from cameraready.evidence.specs.tables import TABLE_SUFFIXES, read_columns, read_table
from cameraready.evidence.study import ACCEPTED

__all__ = [
    "Spec",
    "SpecError",
    "load_object",
    "open_model",
    "parse",
    "read_columns",
    "read_table",
    "value_spec",
    "with_own",
]

PICKLES = (".pkl", ".pickle", ".joblib", ".dill", ".pt", ".pth", ".ckpt", ".bin")
OTHER_TABLES = (
    ".xlsx",
    ".xls",
    ".ods",
    ".feather",
    ".arrow",
    ".h5",
    ".hdf5",
    ".dta",
    ".sav",
    ".npy",
    ".npz",
    ".zip",
    ".gz",
)
CHECKPOINT_FILE = ".gguf"
SHOWN = 120  # characters of the user's text in a message

_OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OPTION = re.compile(r"[a-z][a-z_]*=")
_HF = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_GYM = re.compile(r"([\w.-]+:)?[\w./-]+")


def parse(text: str, *, shipped: Sequence[str], accepts: Sequence[str]) -> Spec:
    """Understand what the user wants a study to be tried on. Opens nothing but looks whether files are there.

    Parameters
    ----------
    text : str
        A shipped name; ``"data.csv:target"``; ``"data.parquet:outcome=spend,treatment=emailed"``; ``"model.json"``,
        ``"model.json:data=rows.csv,target=y"``; ``"hf:Qwen/Qwen3-0.6B"``, ``"hf:NAME@REVISION"``; ``"folder/"`` or
        ``"model.gguf"`` of a language model; ``"gym:Hopper-v5"``; ``"package.module:object"``. Paths may hold colons, targets may hold commas and colons; a target that itself
        looks like an option is written ``target=a=b``.
    shipped : sequence of str
        Names of the study's own workloads.
    accepts : sequence of str
        Kinds that the study takes beside those (`Study.accepts`).

    Raises
    ------
    SpecError
        With a sentence that says what is wrong and what this study accepts.
    """
    text = text.strip()
    if text in shipped:
        return Spec(text, "shipped", text)
    try:
        spec = _understand(text, shipped)
        if spec.kind not in accepts:
            raise SpecError(
                f"{shown(text)} is {ACCEPTED[spec.kind].partition(' (')[0]}, which this study does not take"
            )
    except SpecError as error:
        end = "" if str(error).endswith("?") else "."
        raise SpecError(f"{error}{end} Accepted here: {accepted(shipped, accepts)}.") from None
    return spec


def accepted(shipped: Sequence[str], accepts: Iterable[str]) -> str:
    """What a study takes, in words."""
    ways = [ACCEPTED[kind] for kind in accepts if kind in ACCEPTED]
    if shipped:
        ways.insert(0, f"a name of {', '.join(shipped)}")
    return "; ".join(ways)


def value_spec(value: Any) -> Spec:
    """The spec of Python objects given to `cameraready.check`; it describes `value` and does not hold it."""
    parts = value if isinstance(value, tuple) else (value,)
    text = ", ".join(type(part).__name__ + (str(tuple(part.shape)) if hasattr(part, "shape") else "") for part in parts)
    return Spec(text, "value", "own")


def load_object(text: str) -> Any:
    """Import ``package.module:object`` and return the object. The current folder can be imported from.

    Raises
    ------
    SpecError
        The text has another form, the module is not found or raises, or it has no such object (near misses are listed).
    """
    text = text.strip()
    if not _OBJECT.fullmatch(text):
        raise SpecError(f"{shown(text)} does not name an object; write package.module:object")
    importable_here()
    name, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise SpecError(
                f"there is no module {error.name!r} among the installed packages or in {os.getcwd()}"
                + (f" (wanted for {shown(text)})" if error.name != name else "")
            ) from None
        raise SpecError(
            f"importing {name} failed: it needs the module {error.name!r}, which is not installed"
        ) from error
    except Exception as error:
        raise SpecError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    reached = name
    for part in path.split("."):
        if not hasattr(found, part):
            public = [item for item in dir(found) if not item.startswith("_")]
            near = difflib.get_close_matches(part, public, n=3, cutoff=0.5)
            raise SpecError(f"{reached} has no {part!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        found = getattr(found, part)
        reached += f".{part}"
    return found


def importable_here() -> None:
    """Let modules in the current folder be imported, first of all, as ``python -m`` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def shown(text: str) -> str:
    """`text` quoted, cut to what fits a message."""
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def _understand(text: str, shipped: Sequence[str]) -> Spec:
    if not text or not text.strip(":"):
        raise SpecError(f"{shown(text)} names nothing")
    scheme, _, rest = text.partition(":")
    if scheme in ("hf", "gym"):
        pattern = _HF if scheme == "hf" else _GYM
        if not pattern.fullmatch(rest):
            raise SpecError(f"{shown(rest)} is no name of {ACCEPTED[scheme]}")
        return Spec(text, "hf" if scheme == "hf" else "gym", rest)
    path, rest = _split_path(text)
    if path:
        return _file_spec(text, path, rest)
    if _OBJECT.fullmatch(text):
        return Spec(text, "object", text)
    near = difflib.get_close_matches(text, shipped, n=3)
    if near:
        raise SpecError(f"there is no workload {shown(text)}; did you mean {' or '.join(near)}?")
    raise SpecError(f"{shown(text)} is neither a shipped name, nor a file that exists, nor package.module:object")


def _split_path(text: str) -> tuple[str, str]:
    """The path that `text` begins with and what follows its colon; two empty strings if it begins with none.

    The longest beginning that exists wins, so that paths may hold colons. Otherwise the first that ends like a file.
    """
    ends = [len(text), *(place for place in range(len(text) - 1, 0, -1) if text[place] == ":")]
    if len(text) > 2 and text[1] == ":" and text[2] in "\\/":
        ends = [end for end in ends if end != 1]  # the drive of a Windows path
    for end in ends:
        # A folder counts only as the whole text: `models:net` may well be a module in a folder of that name.
        if _is_file(text[:end]) or (end == len(text) and _exists(text)):
            return text[:end], text[end + 1 :]
    for end in reversed(ends):
        if _suffix(text[:end]) in (*TABLE_SUFFIXES, *MODEL_SUFFIXES, CHECKPOINT_FILE, *PICKLES, *OTHER_TABLES):
            return text[:end], text[end + 1 :]
    return "", ""


def _file_spec(text: str, path: str, rest: str) -> Spec:
    suffix = _suffix(path)
    if suffix in PICKLES:
        raise SpecError(
            f"{shown(path)} is a pickle or may hold one, and loading a pickle runs whatever code is in it, so it is "
            "not opened; save the model with skops.io.dump (.skops), or name an object in a module of yours "
            "(package.module:object)"
        )
    if not _exists(path):
        raise SpecError(f"there is no file {shown(path)}{_near_files(path)}")
    if suffix == CHECKPOINT_FILE or _holds_a_model(path):
        if rest:
            raise SpecError(f"nothing is named behind a language model, got {shown(rest)}")
        return Spec(text, "checkpoint", Path(path).name, _absolute(path))
    if Path(path).expanduser().is_dir():
        raise SpecError(
            f"{shown(path)} is a folder without config.json, so no language model; other workloads are files"
        )
    if not _is_file(path):
        raise SpecError(f"{shown(path)} is a device or the like, not a file")
    if suffix not in (*TABLE_SUFFIXES, *MODEL_SUFFIXES):
        hint = "; save it as .csv or .parquet" if suffix in OTHER_TABLES else ""
        raise SpecError(f"{shown(path)} is of a kind ({suffix or 'no suffix'}) that is not read{hint}")
    options = _options(rest)
    target = options.pop("target", "")
    if suffix in TABLE_SUFFIXES:
        return Spec(text, "table", Path(path).name, _absolute(path), target, options)
    if "data" in options:
        rows = options["data"]
        if not _exists(rows):
            raise SpecError(f"there is no file {shown(rows)}{_near_files(rows)}")
        if _suffix(rows) not in TABLE_SUFFIXES:
            raise SpecError(f"data={rows} is no table; rows are read from {', '.join(TABLE_SUFFIXES)}")
        options["data"] = _absolute(rows)
    elif rest:
        raise SpecError(
            f"rows for a model are named as {Path(path).name}:data=rows.csv,target=COLUMN, not {shown(rest)}"
        )
    return Spec(text, "model", Path(path).name, _absolute(path), target, options)


def _options(rest: str) -> dict[str, str]:
    """``"a=x,b=y"`` as a dict; plain text is the target. A comma parts options only where another option follows."""
    if not rest:
        return {}
    if not _OPTION.match(rest):
        return {"target": rest}
    options: dict[str, str] = {}
    for part in re.split(r",(?=[a-z][a-z_]*=)", rest):
        key, _, value = part.partition("=")
        if not value:
            raise SpecError(f"the option {key}= is empty")
        if key in options:
            raise SpecError(f"the option {key}= is given twice")
        options[key] = value
    return options


def with_own(spec: Spec, *, data: str = "", tasks: Sequence[str] = ()) -> Spec:
    """`spec` with the user's own data (``--data FILE:COLUMN,COLUMN``) and tasks (``--tasks``) among its options.

    Raises
    ------
    SpecError
        There is no such file, it is no table, or no task is named.
    """
    options = dict(spec.options)
    if data:
        path, columns = _split_path(data)
        if not path or not _exists(path):
            raise SpecError(
                f"there is no file {shown(path or data)}{_near_files(path or data)}; data are given as "
                "FILE:COLUMN,COLUMN, such as prompts.jsonl:prompt,answer"
            )
        if _suffix(path) not in TABLE_SUFFIXES:
            raise SpecError(f"{shown(path)} is no table; data are read from {', '.join(TABLE_SUFFIXES)}")
        names = [name.strip() for name in columns.split(",")] if columns else []
        if not all(names):
            raise SpecError(f"{shown(columns)} leaves a column without a name")
        options |= {"data": _absolute(path)} | ({"data_columns": ",".join(names)} if names else {})
    wanted = [name.strip() for text in tasks for name in text.split(",")]
    if not all(wanted):
        raise SpecError(f"{shown(','.join(tasks))} leaves a task without a name")
    if wanted:
        options["tasks"] = ",".join(wanted)
    return replace(spec, options=options)


def _holds_a_model(path: str) -> bool:
    return _exists(path) and (Path(path).expanduser() / "config.json").is_file()


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long a name; a NUL character; an unknown ~user
        return False


def _is_file(path: str) -> bool:
    return _exists(path) and Path(path).expanduser().is_file()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _near_files(path: str) -> str:
    try:
        folder = Path(path).expanduser().parent
        names = sorted(os.listdir(folder))
    except (OSError, ValueError, RuntimeError):
        return ""
    near = difflib.get_close_matches(os.path.basename(path), names, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
