"""Puts a method to the test: plans the trials, runs those that are missing, judges the claims."""

from __future__ import annotations

import datetime
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.stages import Conduct, run_plan
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.findings import NO_VERDICT, collect, find
from cameraready.evidence.outcomes import Outcome
from cameraready.evidence.peers import environments
from cameraready.evidence.planning import (
    Load,
    Plan,
    Selection,
    dry_plan,
    own_arms,
    seed_list,
    workloads_of,
)
from cameraready.evidence.results import Result, commit_of, environment
from cameraready.evidence.specs import SpecError
from cameraready.evidence.study import Study, Tier
from cameraready.evidence.subject import Subject, UsageError, load_subject

Progress = Callable[[str], None]


def check(
    method: str,
    *,
    on: Any = None,
    tier: Tier = "desk",
    with_: Mapping[str, Any] | Sequence[str] = (),
    without: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    claims: Sequence[int | str] | None = None,
    device: str = "cpu",
    dtype: str = "",
    minutes: float | None = None,
    jobs: int | None = None,
    scheduler: Any = None,
    ledger: str | Path | None = None,
    retry: bool = False,
    dry_run: bool = False,
    data: str = "",
    tasks: Sequence[str] = (),
    command: str = "",
    quiet: bool = False,
) -> Result | Plan:
    """Put a method to the test, on the shipped workloads or on your own.

    Parameters
    ----------
    method : str
        Slug (``"oddshap"``), arXiv id or URL; or ``"package.module:STUDY"``.
    on : optional
        Your own workload instead of the shipped ones: a spec (``"data.csv:target"``, ``"package.module:object"`` ...), a
        Python object or tuple such as ``(model, X_train, X_test)``, or a list of these.
    tier : {"desk", "smoke", "full"}
        smoke: seconds, in this process, no verdict meant; desk: minutes on two cores; full: the paper's setting.
    with_ : mapping of name to object, or sequence of "package.module:object"
        Your own method as one more arm.
    without : sequence of str
        Arms to leave out.
    set : mapping
        Values that replace those of the plan's conditions, ``{"budget": 5000}``; a list of values is crossed.
    seeds : int or sequence of int
        How many seeds, or which.
    claims : sequence of int or str
        Only these claims (3 means 3a, 3b ...), and only the trials that they need.
    device, dtype : str
        Handed to the trials.
    minutes : float
        Time for preparing workloads and running trials; building other libraries' environments, once, comes on top. Verdicts
        on what is finished are marked provisional, and the next run goes on from there.
    jobs : int
        Worker processes; by default one a core. With `scheduler`, in each Dask worker; by default one a thread of it.
    scheduler : str or dask.distributed.Client
        Run the trials on a Dask cluster: the address of its scheduler (``"tcp://host:8786"``), or a client of it. Trials
        go to every worker that computes the same as this machine; the ledger stays here.
    ledger : path
        Where finished trials are kept; by default in the user's data folder (or under ``CAMERAREADY_HOME``).
    retry : bool
        Run failed trials again.
    dry_run : bool
        Return a `Plan` instead of running.
    data : str
        Your own prompts or texts for the model named by `on`, where the study takes them:
        ``"prompts.jsonl:prompt,answer"``.
    tasks : sequence of str
        Tasks for the model named by `on`, where the study takes them: ``["lm-eval:arc_easy"]``.
    command : str
        The reproduction command to write into the report; made up from the arguments if empty.
    quiet : bool
        No progress.

    Returns
    -------
    Result, or Plan with `dry_run`

    Raises
    ------
    UsageError, SpecError
        If the call cannot be carried out as written.
    """
    if tier not in get_args(Tier):
        raise UsageError(f"tier must be smoke, desk or full, got {tier!r}")
    if scheduler is not None and tier == "smoke":
        raise UsageError("the smoke tier runs in this process; leave the scheduler out, or choose the tier desk")
    if scheduler is not None and not dry_run:
        from cameraready.evidence.execution.cluster.session import reach

        scheduler = reach(scheduler)
    started = time.monotonic()
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    subject = load_subject(method)
    study = subject.study
    say = _say_nothing if quiet else _say
    arms = own_arms(with_)
    tasks = [tasks] if isinstance(tasks, str) else list(tasks)
    loads = workloads_of(study, tier, on, data, tasks)
    selection = Selection(
        subject=subject,
        tier=tier,
        own=arms,
        without=frozenset(without),
        changes=dict(set or {}),
        seeds=seed_list(study, tier, seeds),
        only=claims,
        device=device,
        dtype=dtype,
    )
    settled = _settled(study, selection, loads)
    if settled and len(settled) == len(loads) and not dry_run:
        return _settled_result(
            subject, tier, settled, loads, command or call_of(method, on, tier, selection, seeds, minutes, data, tasks)
        )
    loads = [load for load in loads if load.name not in settled] or loads
    planned_arms = selection.arms_planned(loads)
    if dry_run:
        with Ledger.open(ledger) as store:
            return dry_plan(selection, loads, store, jobs)

    unavailable = dict.fromkeys(without, "left out")
    lost = _build_peers(subject, planned_arms - selection.without, say)
    notes = [f"{arm} was not run: {reason}" for arm, reason in lost.items()]
    unavailable.update(lost)
    selection = replace(selection, without=selection.without | frozenset(lost))
    trials = selection.trials(loads)
    if not trials:
        raise UsageError(f"nothing to run: no trial of {subject.card.slug} is left under these options")

    libraries = ["numpy", "scipy", "scikit-learn", "polars", *itertools.chain.from_iterable(study.libraries.values())]
    peers = {peer.name for peer in study.peers}
    where = environment([name for name in libraries if name not in peers])
    where.update(
        {f"peer {p.name}": p.requirement for arm in planned_arms - selection.without for p in study.peers_of(arm)}
    )
    command = command or call_of(method, on, tier, selection, seeds, minutes, data, tasks)
    job = Job(
        study=subject.reference,
        specs={load.name: load.spec for load in loads},
        own_workloads=frozenset(load.name for load in loads if load.own),
        own=arms,
        device=device,
        dtype=dtype,
        without=selection.without,
        timeout=study.timeout,
        memory=study.memory,
    )
    in_process = tier == "smoke"
    if not in_process:
        try:
            job.packed()
        except TypeError as error:
            if scheduler is not None:
                raise UsageError(f"{error}; so it cannot run on a cluster") from error
            in_process = True
            notes.append(
                f"{error}; so the trials ran in the calling process, one by one, without limits of time and memory"
            )
    with Ledger.open(ledger) as store:
        if retry:
            failed = [
                key for key, outcome in store.outcomes([t.key for t in trials]).items() if outcome.status != "done"
            ]
            store.forget(failed)
        run = store.start_run(subject.card.slug, tier, command, where)
        status = "failed"
        try:
            conduct = run_plan(
                subject,
                job,
                loads,
                trials,
                store,
                run,
                jobs=jobs,
                minutes=minutes,
                in_process=in_process,
                quiet=quiet,
                say=say,
                scheduler=scheduler,
            )
            status = "interrupted" if conduct.interrupted else "done"
        finally:
            store.end_run(run, status)
        outcomes = store.outcomes([t.key for t in trials])

    rows, failures = collect(study, trials, outcomes)
    missing = [t for t in trials if t.key not in outcomes]
    if not outcomes and {t.workload for t in trials} <= conduct.unprepared.keys():
        raise UsageError("; ".join(_unprepared(conduct)))
    notes += _unprepared(conduct) + conduct.notes
    if conduct.hosts:
        where["hosts"] = ", ".join(f"{name} ({count} trials)" for name, count in sorted(conduct.hosts.items()))
    if missing:
        why = "interrupted" if conduct.interrupted else "out of time" if conduct.ran_out else "broken off"
        notes.append(
            f"{why} after {len(trials) - len(missing)} of {len(trials)} trials; the same call goes on from here"
        )
    findings = find(study, selection, loads, rows, missing, unavailable)
    told = findings.answer
    if tier == "smoke":
        told = (
            f"{len(trials) - len(missing)} of {len(trials)} trials ran, {_lost_trials(outcomes.values())}; {NO_VERDICT}"
        )
    return Result(
        card=subject.card,
        study=study,
        tier=tier,
        answer=told if not settled else " ".join([*settled.values(), told]),
        claims=findings.verdicts,
        rows=rows,
        failures=failures,
        workloads=[load.describe() for load in loads],
        environment=where,
        command=command,
        commit=commit_of(subject.folder),
        started=stamp,
        seconds=time.monotonic() - started,
        notes=notes + findings.notes,
        incomplete=bool(missing),
        interrupted=conduct.interrupted,
        reference=subject.reference,
        _open_component=_component_opener(study, loads[0]),
    )


# --- running --------------------------------------------------------------------------------------------------------


def _build_peers(subject: Subject, arms: Iterable[str], say: Progress) -> dict[str, str]:
    """Build the environments that `arms` need; returns the arms whose environment cannot be had, and why."""
    lost: dict[str, str] = {}
    for arm in sorted(arms):
        for peer in subject.study.peers_of(arm):
            try:
                environments.ensure(peer, subject.folder, progress=say)
            except environments.PeerUnavailable as error:
                lost[arm] = str(error)
    return lost


def _lost_trials(outcomes: Iterable[Outcome]) -> str:
    """How many trials failed, and how many finished without a row, which is no failure: the plan may hold what a model has no use for."""
    ends = [(outcome.status == "done", bool(outcome.rows)) for outcome in outcomes]
    failed = sum(not done for done, _ in ends)
    empty = sum(done and not rows for done, rows in ends)
    told = f"{failed} of them failed" if failed else "none of them failed"
    return f"{told} and {empty} had nothing to measure" if empty else told


def _unprepared(conduct: Conduct) -> list[str]:
    return [f"{name} could not be prepared: {why.strip().splitlines()[-1]}" for name, why in conduct.unprepared.items()]


def _settled(study: Study, selection: Selection, loads: Sequence[Load]) -> dict[str, str]:
    """The user's workloads on which there is nothing to find out, and the sentence that says why.

    Their tables are opened here, before anything else is done, so that one without its column is told at once.
    """
    sentences = {}
    for load in loads:
        if not load.own or (study.settled is None and load.spec.kind != "table"):
            continue
        try:
            workload = study.open(load.spec)
        except SpecError:
            raise
        except ValueError as error:
            raise UsageError(f"{load.name} cannot be used: {error}") from error
        if study.settled is not None:
            sentences[load.name] = study.settled(workload, selection.conditions(load))
    return {name: sentence for name, sentence in sentences.items() if sentence}


def _settled_result(
    subject: Subject, tier: str, settled: Mapping[str, str], loads: Sequence[Load], command: str
) -> Result:
    rows, failures = collect(subject.study, [], {})
    return Result(
        card=subject.card,
        study=subject.study,
        tier=tier,
        answer=" ".join(settled.values()),
        claims=[],
        rows=rows,
        failures=failures,
        workloads=[load.describe() for load in loads],
        command=command,
        commit=commit_of(subject.folder),
        notes=["nothing had to be run"],
        reference=subject.reference,
        _open_component=_component_opener(subject.study, loads[0]),
    )


def _component_opener(study: Study, load: Load) -> Callable[[], Any] | None:
    if study.component is None:
        return None
    build = study.component
    return lambda: build(study.open(load.spec))


def call_of(
    method: str,
    on: Any,
    tier: str,
    selection: Selection,
    seeds: Any,
    minutes: float | None,
    data: str = "",
    tasks: Sequence[str] = (),
) -> str:
    """The command that does the same, or the Python call where objects were given."""
    items = [] if on is None else on if isinstance(on, list) else [on]
    options: list[tuple[str, Any]] = [("--on", item) for item in items]
    options += [("--data", data)] if data else []
    options += [("--tasks", name) for name in tasks]
    options += [] if tier == "desk" else [("--tier", tier)]
    options += [("--with", name) for name in selection.own]
    options += [("--without", name) for name in sorted(selection.without)]
    options += [("--set", f"{name}={json.dumps(value)}") for name, value in selection.changes.items()]
    options += [("--claim", item) for item in selection.only or ()]
    options += [] if seeds is None else [("--seeds", seeds)]
    options += [] if selection.device == "cpu" else [("--device", selection.device)]
    options += [("--dtype", selection.dtype)] if selection.dtype else []
    options += [] if minutes is None else [("--max-minutes", f"{minutes:g}")]
    if all(isinstance(item, str) for item in items):
        return shlex.join(
            ["cameraready", "run", method, *itertools.chain.from_iterable((o, str(v)) for o, v in options)]
        )
    given = ", ".join(f"{name.lstrip('-').replace('max-', '')}={value!r}" for name, value in options if name != "--on")
    return f"cameraready.check({method!r}, on=..., {given})" if given else f"cameraready.check({method!r}, on=...)"


def _say(text: str) -> None:

    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    """Quiet."""


__all__ = ["Plan", "Subject", "UsageError", "check", "load_subject"]
