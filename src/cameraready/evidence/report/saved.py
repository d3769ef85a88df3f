"""Reads back what a run wrote: verdicts for a terminal, the whole result for a page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.outcomes import Failure, Verdict

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

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


def read_result(folder: Path) -> Result:
    """The result that was saved into `folder`, with its study imported.

    Raises
    ------
    ValueError
        If the files are damaged.
    UsageError
        If the method, or something that its study imports, is not there.
    """
    import polars as pl

    from cameraready.evidence.checking import load_subject
    from cameraready.evidence.results import RESULTS_JSON, RESULTS_PARQUET, Result

    path = folder / RESULTS_JSON
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        method = saved["method"]
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
    subject = load_subject(method)
    return Result(
        card=subject.card,
        study=subject.study,
        tier=saved["tier"],
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
    )
