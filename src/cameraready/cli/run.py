"""`run`: put methods to the test, on the shipped workloads or on your own."""

from __future__ import annotations

import json
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cameraready.cli import failing
from cameraready.cli.browse import complete_selection
from cameraready.cli.failing import BadUsage

if TYPE_CHECKING:
    from cameraready.evidence.checking import Plan
    from cameraready.evidence.results import Result

TIERS = ("smoke", "desk", "full")
REPORT_FOLDER = Path("report")

ON_HELP = (
    "Your own workload: data.csv:target, model.json, hf:ID, model.gguf, gym:ID, package.module:object. Repeatable."
)
DATA_HELP = "Your own prompts for the model of --on, where a study takes them: prompts.jsonl:prompt,answer."
TASKS_HELP = "A task for the model of --on, where a study takes them: lm-eval:NAME. Repeatable."
WITH_HELP = "Your own method as one more arm: package.module:object. Repeatable."
SET_HELP = "Replace a value of the plan: budget=5000. Repeatable."
CLAIM_HELP = "Only this claim (3 or 3a) and what it needs. Repeatable."
MINUTES_HELP = "Stop after this long; the next run goes on from there."
SCHEDULER_HELP = "Run the trials on a Dask cluster: tcp://host:8786. --jobs then counts for each Dask worker."
OUT_HELP = "Folder for the report and the results; by default one under report/."
STRICT_HELP = "Exit code 3 if a claim tested in the paper's setting fails."


def run_methods(
    method: Annotated[
        str,
        typer.Argument(
            help="Slug, arXiv id or URL; a room; or 'all'.",
            metavar="METHOD|ROOM|all",
            autocompletion=complete_selection,
        ),
    ],
    on: Annotated[list[str] | None, typer.Option(metavar="SPEC", help=ON_HELP)] = None,
    data: Annotated[str, typer.Option(metavar="FILE:COLUMNS", help=DATA_HELP)] = "",
    tasks: Annotated[list[str] | None, typer.Option(metavar="NAME", help=TASKS_HELP)] = None,
    with_: Annotated[list[str] | None, typer.Option("--with", metavar="OBJECT", help=WITH_HELP)] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="ARM", help="Leave out this arm. Repeatable.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SET_HELP)] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
    claim: Annotated[list[str] | None, typer.Option(metavar="NUMBER", help=CLAIM_HELP)] = None,
    tier: Annotated[str, typer.Option(help="smoke (seconds), desk (minutes) or full (the paper's setting).")] = "desk",
    device: Annotated[str, typer.Option(help="Handed to the trials: cpu, cuda ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Handed to the trials: float32, bfloat16 ...")] = "",
    max_minutes: Annotated[float | None, typer.Option(min=0.0, help=MINUTES_HELP)] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes; by default one a core.")] = None,
    scheduler: Annotated[str | None, typer.Option(metavar="ADDRESS", help=SCHEDULER_HELP)] = None,
    ledger: Annotated[Path | None, typer.Option(help="Where finished trials are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed trials again.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help=STRICT_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in the browser.")] = False,
) -> None:
    """Put a method to the test, or all of a room.

    The first line printed is the answer; progress goes to stderr. Exit code 0 whatever the verdicts, 1 after an
    error or if no trial returned rows, 2 if the command cannot be carried out as written.
    """
    if tier not in TIERS:
        raise BadUsage(f"--tier must be smoke, desk or full, got {tier!r}")
    options: dict[str, Any] = {
        "on": list(on) if on else None,
        "data": data,
        "tasks": tasks or [],
        "tier": tier,
        "with_": with_ or [],
        "without": without or [],
        "set": dict(_setting(text) for text in set_ or []),
        "seeds": seeds,
        "claims": claim or None,
        "device": device,
        "dtype": dtype,
        "minutes": max_minutes,
        "jobs": jobs,
        "scheduler": scheduler,
        "ledger": ledger,
        "retry": retry,
        "dry_run": dry_run,
    }
    methods = _methods(method)
    done, codes = _run_each(methods, options, out, as_json=as_json, dry_run=dry_run, open_page=open_)
    if as_json:
        from cameraready.cli.terminal import print_json

        print_json(done if len(methods) > 1 else done[0] if done else None)
    if any(codes):
        raise typer.Exit(failing.ERROR if len(methods) > 1 else codes[0])
    if strict and any(_refuted(entry) for entry in done):
        raise typer.Exit(failing.CLAIM_FAILED)


def _methods(name: str) -> list[str]:
    """What `name` stands for, as names that `check` takes; package.module:STUDY is a study outside the catalogue."""
    from cameraready.catalog import UnknownMethod, select

    if ":" in name and "/" not in name and not name.lower().startswith("arxiv:"):
        return [name]
    try:
        return [card.slug for card in select(name)]
    except UnknownMethod as error:
        raise BadUsage(str(error)) from error


def _run_each(
    methods: Sequence[str], options: dict[str, Any], out: Path | None, *, as_json: bool, dry_run: bool, open_page: bool
) -> tuple[list[dict[str, Any]], list[int]]:
    """Run one method after the other; an error in one is told, and the others still run."""
    done: list[dict[str, Any]] = []
    codes: list[int] = []
    for index, method in enumerate(methods):
        if len(methods) > 1:
            failing.say(f"[{index + 1}/{len(methods)}] {method}")
            if index and not as_json:
                print()
        title = method if len(methods) > 1 else ""
        try:
            finished = _check(method, options)
            if dry_run:
                done.append(_tell_plan(finished, title, as_json))
            else:
                page = write_run(finished, out, alone=len(methods) == 1)
                done.append(_tell_result(finished, page, title, as_json))
                if _nothing_finished(finished) and not _was_interrupted(finished):
                    failing.say(
                        f"{title or method}: no trial returned rows, so there is nothing to judge; {_why(finished)}"
                    )
                    codes.append(failing.ERROR)
                    continue
                if open_page:
                    webbrowser.open(page.absolute().as_uri())
                if _was_interrupted(finished):
                    codes.append(failing.INTERRUPTED)
                    break
            codes.append(0)
        except Exception as error:
            failing.tell(error, about=title)
            codes.append(failing.USAGE if isinstance(error, BadUsage) else failing.ERROR)
            if len(methods) > 1:
                done.append({"method": method, "error": failing.sentence(error)})
    return done, codes


def _why(finished: Any) -> str:
    lines = finished.failures[0].error.strip().splitlines() if finished.failures else []
    return f"the first failure: {lines[-1]}" if lines else "the report shows why."


def _check(method: str, options: dict[str, Any]) -> Any:
    import cameraready

    check = cameraready.check
    from cameraready.evidence.checking import UsageError
    from cameraready.evidence.specs import SpecError

    try:
        return check(method, command=command_of(method, options), **options)
    except (UsageError, SpecError) as error:
        raise BadUsage(str(error)) from error


def command_of(method: str, options: dict[str, Any]) -> str:
    """The line that makes the same measurements again."""
    words = ["cameraready", "run", method]
    if options["tier"] != "desk":
        words += ["--tier", options["tier"]]
    if options["data"]:
        words += ["--data", options["data"]]
    for flag, name in (
        ("--on", "on"),
        ("--tasks", "tasks"),
        ("--with", "with_"),
        ("--without", "without"),
        ("--claim", "claims"),
    ):
        for value in options[name] or ():
            words += [flag, value]
    for name, value in options["set"].items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    for flag, name, usual in (("--seeds", "seeds", None), ("--device", "device", "cpu"), ("--dtype", "dtype", "")):
        if options[name] != usual:
            words += [flag, str(options[name])]
    if options["minutes"] is not None:
        words += ["--max-minutes", f"{options['minutes']:g}"]
    return shlex.join(words)


def write_run(result: Result, out: Path | None, *, alone: bool) -> Path:
    """Write results and page of a run; the page's path.

    They go into `out` itself where the run is alone and a folder was named, otherwise into a sub-folder of their own,
    beside an index over all of them.
    """
    from cameraready.evidence.report import page_name

    if out is not None and alone:
        return _write_into(out, result)
    root = REPORT_FOLDER if out is None else out
    page = _write_into(root / page_name(result), result)
    write_index_of(root)
    return page


def _write_into(folder: Path, result: Result) -> Path:
    """Page and results of a run; the page first, so that what it cannot show replaces nothing."""
    page = result.report(folder)
    result.save(folder)
    return page


def write_index_of(root: Path) -> Path:
    """Write the index over the reports below `root` and over what the ledger remembers."""
    from cameraready.evidence.execution.ledger import Ledger, LedgerError, default_path
    from cameraready.evidence.report import write_index

    path, history = default_path(), []
    if path.is_file():
        try:
            with Ledger.open(path) as ledger:
                history = ledger.runs()
        except LedgerError as error:
            failing.tell(error, about="the index is without the ledger's runs")
    return write_index(root, history, str(path))


def _tell_plan(plan: Plan, title: str, as_json: bool) -> dict[str, Any]:
    if not as_json:
        print(f"{title}: {plan}" if title else str(plan))
    return {
        "trials": plan.trials,
        "finished": plan.finished,
        "blocks": dict(plan.blocks),
        "hours": plan.hours,
        "downloads": list(plan.downloads),
        "memory_gib": plan.memory_gib,
        "notes": list(plan.notes),
    }


def _tell_result(result: Result, page: Path, title: str, as_json: bool) -> dict[str, Any]:
    if not as_json:
        from cameraready.cli import terminal

        terminal.print_result(terminal.console(), result, str(page), title)
        sys.stdout.flush()
    return {**result.to_json(), "report": str(page)}


def _was_interrupted(result: Result) -> bool:
    return result.interrupted


def _nothing_finished(result: Result) -> bool:
    """Whether no trial of the run returned rows, though some failed or did not run."""
    rows = result.rows
    some = "status" in rows.columns and (rows["status"] == "done").any()
    return not some and (bool(result.failures) or result.incomplete)


def _refuted(entry: dict[str, Any]) -> bool:
    return any(claim["verdict"] == "fails" and claim["scope"] == "exact" for claim in entry.get("claims", []))


def _setting(text: str) -> tuple[str, Any]:
    """``budget=5000`` -> ("budget", 5000); values are JSON where they parse as such, text otherwise."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadUsage(f"--set takes NAME=VALUE, such as budget=5000; got {text!r}")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value
