"""Reads back what a run wrote: verdicts for a terminal, the whole result for a page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.outcomes import Failure, Verdict

if TYPE_CHECKING:
    from cameraready.evidence.results import Result
    from cameraready.evidence.subject import Subject

_VERDICT_FIELDS = {f.name for f in fields(Verdict)}
_FAILURE_FIELDS = {f.name for f in fields(Failure)}


def verdicts_of(saved: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts of a ``results.json``; keys of a later version are ignored."""
    found = []
    for claim in saved["claims"]:
        known = _known(claim, _VERDICT_FIELDS)
        number = re.match(r"\d+", known["label"])
        found.append(Verdict(**{"number": int(number[0]) if number else 0, **known}))
    return found


def _known(item: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name in names}


def read_result(folder: Path, *, trust: bool = False) -> Result:
    """The result that was saved into `folder`, with its study imported.

    A method of the catalogue brings its own study. Any other study is code that the files name; it is imported only with
    `trust`, or if the calling program has imported it already.

    Raises
    ------
    ValueError
        If the files are damaged.
    UsageError
        If the method, or something that its study imports, is not there; or the study is not to be trusted.
    """
    import polars as pl

    from cameraready.evidence.results import RESULTS_JSON, RESULTS_PARQUET, Result
    from cameraready.evidence.soundness import check

    path = folder / RESULTS_JSON
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        method, study, tier = str(saved["method"]), str(saved.get("study", "")), str(saved["tier"])
        claims = verdicts_of(saved)
        failures = [
            Failure(**{name: value for name, value in item.items() if name in _FAILURE_FIELDS})
            for item in saved["failed_trials"]
        ]
        rows = pl.read_parquet(folder / RESULTS_PARQUET)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {Path(error.filename or RESULTS_PARQUET).name}") from error
    except (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"the results in {folder} are damaged: {type(error).__name__}: {error}") from error
    subject = _subject(method, study, trust)
    result = Result(
        card=subject.card,
        study=subject.study,
        tier=tier,
        answer=saved.get("answer", ""),
        claims=claims,
        rows=rows,
        failures=failures,
        workloads=saved.get("workloads", []),
        environment=saved.get("environment", {}),
        command=saved.get("command", ""),
        commit=saved.get("commit", ""),
        started=saved.get("started", ""),
        seconds=saved.get("seconds", 0.0),
        notes=saved.get("notes", []),
        incomplete=saved.get("incomplete", False),
        reference=subject.reference,
    )
    check(result)
    return result


def _subject(method: str, study: str, trust: bool) -> Subject:
    from cameraready.catalog import UnknownMethod, resolve
    from cameraready.evidence.subject import UsageError, load_subject

    try:
        return load_subject(resolve(method).slug)
    except UnknownMethod:
        reference = study or method
    module, colon, _ = reference.partition(":")
    if not module or not colon:
        raise ValueError(f"the results are of {method!r}, which is no method of the catalogue, and name no study")
    if not trust and module not in sys.modules:
        raise UsageError(
            f"the results are of {reference}, a study outside the catalogue: that is code, and showing them would run it."
            " With --trust it is imported"
        )
    return load_subject(reference)
