"""The index over reports: by room, what each run answered; then what else the ledger remembers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.catalog import UnknownMethod, catalog, resolve
from cameraready.evidence.report import page
from cameraready.evidence.report.saved import verdicts_of

if TYPE_CHECKING:
    from cameraready.evidence.execution.ledger import Run

#: Sub-folder for the pages of results that came with the methods, apart from the user's own.
SHIPPED = "shipped"
ELSEWHERE = "Other studies"  # of methods that are not in the catalogue
HISTORY_SHOWN = 40


def render_index(folder: Path, history: Sequence[Run] = (), ledger: str = "") -> str:
    """The index over all runs in sub-folders of `folder` that have results and a page.

    Parameters
    ----------
    folder : Path
        Pages of the user's runs lie in its sub-folders, those of shipped results in sub-folders of ``shipped``.
    history : sequence of Run
        Runs that the ledger remembers, oldest first.
    ledger : str
        Where that ledger is.

    A run whose ``results.json`` cannot be read is listed as such, and is no reason not to show the others.
    """
    runs, damaged = [], []
    for path in _results(folder):
        try:
            runs.append(_saved_run(path, folder))
        except ValueError as error:
            damaged.append(str(error))
    by_command = {run["command"]: run["href"] for run in runs if run["command"]}
    recent = list(reversed(history))[:HISTORY_SHOWN]
    return page.render(
        "index.html.j2",
        rooms=_rooms(runs),
        n_runs=len(runs),
        damaged=damaged,
        history=[_remembered(run, by_command) for run in recent],
        forgotten=len(history) - len(recent),
        ledger=ledger,
        style=page.style_sheet(),
    )


def _results(folder: Path) -> list[Path]:
    found = [*folder.glob("*/results.json"), *folder.glob(f"{SHIPPED}/*/results.json")]
    return sorted(path for path in found if path.with_name("index.html").is_file())


def _saved_run(path: Path, folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {
            "method": str(saved["method"]),
            "room": _room_of(str(saved["method"])),
            "tier": str(saved["tier"]),
            "lead": _first_clause(saved["answer"]),
            "incomplete": saved["incomplete"],
            "command": str(saved["command"]),
            "own": [load["name"] for load in saved["workloads"] if load.get("own")],
            "verdicts": verdicts_of(saved),
            "started": saved["started"],
            "date": page.in_words(saved["started"]),
            "shipped": path.parent.parent.name == SHIPPED and path.parent.parent != folder,
            "href": path.with_name("index.html").relative_to(folder).as_posix(),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it or run the study again"
        ) from error


def _first_clause(answer: str) -> str:
    """The answer on its first workload; the page has all of it."""
    first, more, _ = answer.partition("; ")
    return f"{first} …" if more else first


def _room_of(method: str) -> str:
    try:
        return resolve(method).room
    except UnknownMethod:
        return ""


def _rooms(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs by room in the order of the alphabet, methods likewise, the newest run of a method first."""
    rooms = []
    methods = {run["method"] for run in runs}
    for name in sorted({run["room"] for run in runs}, key=lambda room: (room == "", room)):
        here = sorted((run for run in runs if run["room"] == name), key=lambda run: run["started"], reverse=True)
        here.sort(key=lambda run: run["method"])
        waiting = [card.slug for card in catalog() if card.room == name and card.slug not in methods]
        rooms.append({"name": name.capitalize() if name else ELSEWHERE, "runs": here, "waiting": waiting})
    return rooms


def _remembered(run: Run, by_command: dict[str, str]) -> dict[str, Any]:
    """A line of the ledger's history, with the page that the same command wrote."""
    started = datetime.datetime.fromtimestamp(run.started, datetime.UTC)
    return {
        "date": f"{started:%Y-%m-%d %H:%M}",
        "method": run.method,
        "status": "not ended" if run.ended is None else run.status,
        "trials": run.trials,
        "command": run.command,
        "href": by_command.get(run.command, ""),
    }
