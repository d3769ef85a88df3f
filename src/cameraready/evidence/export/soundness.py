"""Whether a result can be exported: read-back results may hold anything, and other tools must not be fed it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cameraready.evidence.export.frames import csv_bytes
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report.wording import LOOKS

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "VerdictWord": (str,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
    "Mapping[str, float]": (Mapping,),
}
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Mapping: "a table of numbers"}


def check(result: Result) -> None:
    """Refuse a result whose values are not what they should be.

    Raises
    ------
    ValueError
        Naming the value.
    """
    for name in ("tier", "answer", "command", "commit", "started"):
        _must_be(getattr(result, name), (str,), name)
    _must_be(result.seconds, (int, float), "seconds")
    _all_must_be(result.notes, (str,), "notes")
    _must_be(result.environment, (Mapping,), "environment", "a table of text")
    for key, value in result.environment.items():
        _must_be(value, (str,), f"environment {key!r}")
    _all_must_be(result.workloads, (Mapping,), "workloads", "a table")
    for verdict in result.claims:
        _check_verdict(verdict)


def _check_verdict(verdict: Verdict) -> None:
    _must_be(verdict.label, (str,), "the label of a claim")
    for field in dataclasses.fields(Verdict):
        value = getattr(verdict, field.name)
        kinds = _KINDS[str(field.type)]
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError(f"the results are damaged: {field.name} of claim {verdict.label} is {value}")
        _must_be(value, kinds, f"{field.name} of claim {verdict.label}")
    if verdict.verdict not in LOOKS:
        known = ", ".join(LOOKS)
        raise ValueError(
            f"the results are damaged: the verdict of claim {verdict.label} is {verdict.verdict!r}; known are {known}"
        )


def _all_must_be(values: Any, kinds: tuple[type, ...], name: str, noun: str = "") -> None:
    _must_be(values, (list, tuple), name, "a list")
    for value in values:
        _must_be(value, kinds, f"an entry of {name}", noun)


def _must_be(value: Any, kinds: tuple[type, ...], name: str, noun: str = "") -> None:
    if not isinstance(value, kinds):
        wanted = noun or _NAMES[kinds[-1] if kinds[-1] is not type(None) else float]
        raise ValueError(f"the results are damaged: {name} should be {wanted}, got {str(value)[:60]!r}")


def digest(result: Result) -> str:
    """A digest of everything in a result; equal for equal results, whenever and wherever it is taken."""
    text = json.dumps(result.to_json(), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode() + csv_bytes(result.rows)).hexdigest()
