"""Whether a result that was read back is one: files may hold anything, and pages and other tools must not be fed it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report.wording import LOOKS

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

LARGEST = 2**53  # whole numbers beyond are no counts, and no float holds them

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
    _must_be_number(result.seconds, "seconds")
    if not math.isfinite(result.seconds):
        raise ValueError(f"the results are damaged: seconds is {result.seconds}")
    _must_be(result.incomplete, (bool,), "incomplete")
    _all_must_be(result.notes, (str,), "notes")
    _must_be(result.environment, (Mapping,), "environment", "a table of text")
    for key, value in result.environment.items():
        _must_be(value, (str,), f"environment {key!r}")
    _all_must_be(result.workloads, (Mapping,), "workloads", "a table")
    for load in result.workloads:
        _must_be(load.get("name"), (str,), "the name of a workload")
    for verdict in result.claims:
        _check_verdict(verdict)
    for failure in result.failures:
        for name in ("workload", "arm", "block", "status", "error"):
            _must_be(getattr(failure, name), (str,), f"{name} of a failed trial")
        _must_be(failure.condition, (Mapping,), "the condition of a failed trial", "a table")
        _must_be_number(failure.seed, "the seed of a failed trial")


def _check_verdict(verdict: Verdict) -> None:
    _must_be(verdict.label, (str,), "the label of a claim")
    for field in dataclasses.fields(Verdict):
        value = getattr(verdict, field.name)
        kinds = _KINDS[str(field.type)]
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError(f"the results are damaged: {field.name} of claim {verdict.label} is {value}")
        _must_be(value, kinds, f"{field.name} of claim {verdict.label}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _must_be_number(value, f"{field.name} of claim {verdict.label}")
    if min(verdict.blocks, verdict.failed_trials, verdict.lost_blocks) < 0:
        raise ValueError(f"the results are damaged: a count of claim {verdict.label} is negative")
    if (verdict.low is None) != (verdict.high is None):
        raise ValueError(f"the results are damaged: the interval of claim {verdict.label} has one end only")
    if verdict.verdict not in LOOKS:
        known = ", ".join(LOOKS)
        raise ValueError(
            f"the results are damaged: the verdict of claim {verdict.label} is {verdict.verdict!r}; known are {known}."
            " Results of a later version need that version"
        )


def _must_be_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the results are damaged: {name} should be a number, got {str(value)[:60]!r}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"the results are damaged: {name} is too large a number")


def _all_must_be(values: Any, kinds: tuple[type, ...], name: str, noun: str = "") -> None:
    _must_be(values, (list, tuple), name, "a list")
    for value in values:
        _must_be(value, kinds, f"an entry of {name}", noun)


def _must_be(value: Any, kinds: tuple[type, ...], name: str, noun: str = "") -> None:
    if not isinstance(value, kinds):
        wanted = noun or _NAMES[kinds[-1] if kinds[-1] is not type(None) else float]
        raise ValueError(f"the results are damaged: {name} should be {wanted}, got {str(value)[:60]!r}")
