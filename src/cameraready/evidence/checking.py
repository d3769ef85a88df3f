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

import polars as pl

from cameraready.evidence.answer import answer as make_answer
from cameraready.evidence.execution import environments
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.outcomes import Failure, Outcome, Trial, Verdict
from cameraready.evidence.planning import (
    OWN,
    Load,
    Plan,
    Selection,
    dry_plan,
    own_arms,
    relevant,
    seed_list,
    workloads_of,
)
from cameraready.evidence.results import Result, commit_of, environment, make_frame
from cameraready.evidence.running import run_plan
from cameraready.evidence.study import Answer, Claim, Study, Tier, Untested
from cameraready.evidence.subject import Subject, UsageError, load_subject
from cameraready.evidence.verdicts import judge

Progress = Callable[[str], None]
NO_VERDICT = "the smoke tier proves that a study runs and gives no verdict"


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
    ledger: str | Path | None = None,
    retry: bool = False,
    dry_run: bool = False,
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
        Worker processes; by default one a core.
    ledger : path
        Where finished trials are kept; by default in the user's data folder (or under ``CAMERAREADY_HOME``).
    retry : bool
        Run failed trials again.
    dry_run : bool
        Return a `Plan` instead of running.
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
    started = time.monotonic()
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    subject = load_subject(method)
    study = subject.study
    say = _say_nothing if quiet else _say
    arms = own_arms(with_)
    loads = workloads_of(study, tier, on)
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
    command = command or _command(method, on, tier, selection, seeds, minutes)
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
            )
            status = "interrupted" if conduct.interrupted else "done"
        finally:
            store.end_run(run, status)
        outcomes = store.outcomes([t.key for t in trials])

    rows, failures = _collect(study, trials, outcomes)
    notes += [
        f"{name} could not be prepared: {why.strip().splitlines()[-1]}" for name, why in conduct.unprepared.items()
    ]
    missing = [t for t in trials if t.key not in outcomes]
    if missing:
        why = "interrupted" if conduct.interrupted else "out of time" if conduct.ran_out else "broken off"
        notes.append(
            f"{why} after {len(trials) - len(missing)} of {len(trials)} trials; the same command goes on from here"
        )
    notes += [
        f"the rule of claim {c.label} was changed: {c.changed}"
        for c in study.claims
        if isinstance(c, Claim) and c.changed
    ]
    claims_here, elsewhere = _claims_of_this_run(selection.claims, loads)
    if elsewhere:
        notes.append(f"claims {', '.join(elsewhere)} are about other workloads and were not part of this run")
    judged = replace(study, claims=claims_here, answer=_answer_of_this_run(study.answer, loads))
    verdicts = [_mark_provisional(v, judged, missing) for v in judge(judged, rows, unavailable=unavailable)]
    answer = make_answer(judged, rows, verdicts=verdicts, unavailable=unavailable)
    if tier == "smoke":
        verdicts = [
            v if v.verdict == "untested" else replace(v, verdict="inconclusive", reason=NO_VERDICT) for v in verdicts
        ]
        answer = f"The study runs: {len(trials)} trials, {len(failures)} of them failed; {NO_VERDICT}"
    return Result(
        card=subject.card,
        study=study,
        tier=tier,
        answer=answer,
        claims=verdicts,
        rows=rows,
        failures=failures,
        workloads=[load.describe() for load in loads],
        environment=where,
        command=command,
        commit=commit_of(subject.folder),
        started=stamp,
        seconds=time.monotonic() - started,
        notes=notes,
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


def _collect(
    study: Study, trials: Sequence[Trial], outcomes: Mapping[str, Outcome]
) -> tuple[pl.DataFrame, list[Failure]]:
    records: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for trial in trials:
        outcome = outcomes.get(trial.key)
        if outcome is None:
            continue
        head = {"workload": trial.workload, **trial.condition, "seed": trial.seed}
        tail = {
            "trial": trial.key[:12],
            "status": outcome.status,
            "trial_seconds": round(float(outcome.seconds), 6),
            "trial_peak_mb": round(float(outcome.peak_mb), 1),
        }
        if outcome.status == "done":
            records.extend({**head, **row, **tail} for row in outcome.rows)
        else:
            error = outcome.error.strip()
            records.append({**head, **tail, "failure": error.splitlines()[-1] if error else ""})
            failures.append(
                Failure(
                    trial.workload,
                    trial.arm,
                    trial.block,
                    trial.seed,
                    dict(trial.condition),
                    outcome.status,
                    outcome.error,
                )
            )
    frame = make_frame(records) if records else pl.DataFrame(schema={"workload": pl.String, "status": pl.String})
    absent = [name for name in (study.arms, study.block, "status") if name not in frame.columns]
    return frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in absent), failures


def _mark_provisional(verdict: Verdict, study: Study, missing: Sequence[Trial]) -> Verdict:
    """Provisional: trials that the claim looks at have not run yet."""
    claim = next(c for c in study.claims if c.label == verdict.label)
    if not isinstance(claim, Claim):
        return verdict
    for workload in {t.workload for t in missing} if verdict.workload in ("all", "") else {verdict.workload}:
        waiting = [t.condition for t in missing if t.workload == workload]
        if waiting and relevant(study, claim, workload, waiting):
            return replace(verdict, provisional=True)
    return verdict


def _claims_of_this_run(
    claims: Sequence[Claim | Untested], loads: Sequence[Load]
) -> tuple[list[Claim | Untested], list[str]]:
    """The claims that some workload of the run can speak to, and the labels of the others.

    Among a claim's workloads, ``"own"`` stands for every workload of the user's.
    """
    names = {load.name for load in loads}
    here: list[Claim | Untested] = []
    elsewhere: list[str] = []
    for claim in claims:
        if isinstance(claim, Claim) and claim.workloads is not None:
            claim = replace(claim, workloads=_with_own(claim.workloads, loads))
            if not names.intersection(claim.workloads or ()):
                elsewhere.append(claim.label)
                continue
        here.append(claim)
    return here, elsewhere


def _answer_of_this_run(wanted: Answer | None, loads: Sequence[Load]) -> Answer | None:
    if wanted is None or wanted.workloads is None:
        return wanted
    return replace(wanted, workloads=_with_own(wanted.workloads, loads))


def _with_own(names: Sequence[str], loads: Sequence[Load]) -> list[str]:
    return [*names, *(load.name for load in loads if load.own and OWN in names)]


def _component_opener(study: Study, load: Load) -> Callable[[], Any] | None:
    if study.component is None:
        return None
    build = study.component
    return lambda: build(study.open(load.spec))


def _command(method: str, on: Any, tier: str, selection: Selection, seeds: Any, minutes: float | None) -> str:
    parts = ["cameraready", "run", method]
    for item in [] if on is None else on if isinstance(on, list) else [on]:
        parts += ["--on", item if isinstance(item, str) else f"<{type(item).__name__}>"]
    parts += [] if tier == "desk" else ["--tier", tier]
    for option, values in (
        ("--with", selection.own),
        ("--without", sorted(selection.without)),
        ("--set", [f"{name}={json.dumps(value)}" for name, value in selection.changes.items()]),
        ("--claim", selection.only or ()),
    ):
        for value in values:
            parts += [option, str(value)]
    parts += [] if seeds is None else ["--seeds", str(seeds)]
    parts += [] if selection.device == "cpu" else ["--device", selection.device]
    parts += ["--dtype", selection.dtype] if selection.dtype else []
    parts += [] if minutes is None else ["--max-minutes", f"{minutes:g}"]
    return shlex.join(parts)


def _say(text: str) -> None:

    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    """Quiet."""


__all__ = ["Plan", "Subject", "UsageError", "check", "load_subject"]
