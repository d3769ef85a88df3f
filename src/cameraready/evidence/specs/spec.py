"""The record of what a study is tried on, and the digest of its content."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["shipped", "table", "model", "object", "hf", "checkpoint", "gym", "value"]


#: In a language model's folder: settings, vocabularies, chat templates, weights.
CHECKPOINT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".safetensors")


class SpecError(ValueError):
    """A workload that cannot be understood or opened; the message says what is wrong and what is accepted."""


@dataclass(frozen=True)
class Spec:
    """What a study is tried on. `specs.parse` makes it from text; a study's `open` turns it into an object.

    Attributes
    ----------
    text : str
        As the user typed it.
    kind : str
        ``"shipped"``, ``"table"``, ``"model"``, ``"object"``, ``"hf"``, ``"checkpoint"``, ``"gym"``, or ``"value"`` for a
        Python object given to `cameraready.check`.
    name : str
        Shipped name, file name, ``"Qwen/Qwen3-0.6B"``, ``"Hopper-v5"`` or ``"package.module:object"``.
    path : str
        Absolute path of the file of a table or model, or of a checkpoint's file or folder, else empty.
    target : str
        The column to predict, where one was named.
    options : mapping of str to str
        What else was named, such as ``{"outcome": "spend", "treatment": "emailed"}``; ``data`` is an absolute path,
        ``data_columns`` names columns of it, ``tasks`` names tasks, both separated by commas.
    value : object
        The Python object of kind ``"value"``; not part of comparisons.
    """

    text: str
    kind: Kind
    name: str
    path: str = ""
    target: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    value: Any = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.text, self.kind, self.path))

    def with_value(self, value: Any) -> Spec:
        return replace(self, value=value)

    @property
    def data(self) -> Spec | None:
        """The table that goes with a model file (``model.json:data=rows.csv,target=y``), or None."""
        path = self.options.get("data")
        if self.kind != "model" or not path:
            return None
        options = {key: option for key, option in self.options.items() if key != "data"}
        return Spec(self.text, "table", Path(path).name, path=path, target=self.target, options=options)

    def content_digest(self) -> str:
        """Digest of all that the spec's content depends on, for keys of trials (64 hexadecimal digits).

        Files count by their bytes, not by their place. ``module:object`` counts by the module's code without comments
        and docstrings, and that of the modules beside it which it imports. Names of shipped workloads, Hugging Face
        models and environments count as names: what they stand for changes with the code and the versions, which a key
        holds too.

        Raises
        ------
        SpecError
            A file is gone, or the kind is ``"value"``, which has no content of its own.
        """
        if self.kind == "value":
            raise SpecError("a Python object has no content digest; the engine makes its own from the pickled object")
        parts: dict[str, Any] = {"kind": self.kind, "target": self.target, "options": dict(self.options)}
        if "data" in self.options:
            parts["options"] = {**self.options, "data": file_digest(self.options["data"])}
        if self.kind == "checkpoint" and Path(self.path).is_dir():
            parts["files"] = {path.name: file_digest(str(path)) for path in checkpoint_files(self.path)}
        elif self.path:
            parts["file"] = file_digest(self.path)
        elif self.kind == "object":
            from cameraready.evidence.execution.key import code_digest
            from cameraready.evidence.specs import importable_here

            importable_here()
            module, _, attribute = self.name.partition(":")
            try:
                parts["code"] = [code_digest(module), attribute]
            except (ModuleNotFoundError, SyntaxError) as error:
                raise SpecError(f"the code of {self.name} cannot be read: {error}") from error
        else:
            parts["name"] = self.name
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def checkpoint_files(folder: str) -> list[Path]:
    """The files of a language model's folder that say what it computes: settings, tokenizer and weights."""
    try:
        found = sorted(path for path in Path(folder).iterdir() if path.suffix in CHECKPOINT_SUFFIXES and path.is_file())
    except OSError as error:
        raise SpecError(f"{folder} cannot be read: {error.strerror or error}") from error
    return found


def file_digest(path: str) -> str:
    """SHA-256 of a file's bytes; read once as long as the file's size and time of change stay the same."""
    try:
        facts = Path(path).stat()
        return _file_digest(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=64)
def _file_digest(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
