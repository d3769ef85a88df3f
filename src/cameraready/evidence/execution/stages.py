"""Runs the trials of a plan: workloads are prepared before their trials, and a time limit is spent where it gives verdicts."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cameraready.evidence.execution import key, pool
from cameraready.evidence.execution.ledger import Ledger, data_folder
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.outcomes import Trial
from cameraready.evidence.planning import Load
from cameraready.evidence.subject import Subject

Say = Callable[[str], None]


@dataclass
class Conduct:
    """How a run went. `unprepared` tells why a workload could not be prepared."""

    interrupted: bool = False
    ran_out: bool = False
    unprepared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_plan(
    subject: Subject,
    job: Job,
    loads: Sequence[Load],
    trials: Sequence[Trial],
    store: Ledger,
    run: int,
    *,
    jobs: int | None,
    minutes: float | None,
    in_process: bool,
    quiet: bool,
    say: Say,
) -> Conduct:
    """Prepare the workloads that trials need, and run the trials that the ledger does not hold.

    Without a time limit everything is prepared first and all trials run in one go. With one, the trials run in the plan's
    order, workload by workload, each prepared when its turn comes; the last third of the time is kept for trials that run
    alone.
    """
    conduct = Conduct()
    started = time.monotonic()
    with _progress(trials, store, minutes, quiet) as on_outcome:
        for stage, share in _stages(trials, minutes):
            left = None if minutes is None else minutes * share - (time.monotonic() - started) / 60
            if left is not None and left <= 0:
                conduct.ran_out = True
                continue
            ready, errors = prepare(subject, job, loads, stage, store, jobs=jobs, in_process=in_process, say=say)
            conduct.unprepared.update(errors)
            left = None if minutes is None else minutes * share - (time.monotonic() - started) / 60
            summary = pool.run_trials(
                [t for t in stage if t.workload not in errors],
                ready,
                store,
                run,
                jobs=jobs,
                minutes=None if left is None else max(left, 0.0),
                on_outcome=on_outcome,
                in_process=in_process,
            )
            conduct.ran_out |= summary.ran_out
            conduct.notes += summary.notes
            if summary.interrupted:
                conduct.interrupted = True
                break
    return conduct


def _stages(trials: Sequence[Trial], minutes: float | None) -> Iterator[tuple[list[Trial], float]]:
    """Trials to run in one go, and the share of the time that is gone when they have to be done."""
    if minutes is None:
        yield list(trials), 1.0
        return
    shared = [t for t in trials if not t.alone]
    alone = [t for t in trials if t.alone]
    for _, group in itertools.groupby(shared, key=lambda t: t.workload):
        yield list(group), 1 - pool.ALONE_SHARE if alone else 1.0
    if alone:
        yield alone, 1.0


def prepare(
    subject: Subject,
    job: Job,
    loads: Sequence[Load],
    trials: Sequence[Trial],
    store: Ledger,
    *,
    jobs: int | None,
    in_process: bool,
    say: Say,
) -> tuple[Job, Mapping[str, str]]:
    """The job with the prepared arrays of the workloads that have trials to run; and what could not be prepared, and why."""
    if subject.study.prepare is None:
        return job, {}
    finished = store.finished(t.key for t in trials)
    needed = {t.workload for t in trials if t.key not in finished}
    versions = key.arm_versions(subject.study, "*", subject.folder)
    digests = {
        load.name: key.trial_key(
            code=subject.code, content=load.digest, condition={"prepare": True}, seed=0, versions=versions
        )
        for load in loads
        if load.name in needed
    }

    def tell(name: str, error: str) -> None:
        say(f"prepared {name}" if not error else f"{name} could not be prepared: {error.strip().splitlines()[-1]}")

    folder = data_folder() / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name, digest in digests.items() if not (folder / f"{digest}.npz").exists()]
    if missing:
        say(f"preparing {', '.join(missing)} (once; kept for the next runs)")
    paths, errors = pool.prepare_workloads(job, digests, folder, jobs=jobs, on_prepared=tell, in_process=in_process)
    return replace(job, prepared=paths), errors


@contextlib.contextmanager
def _progress(
    trials: Sequence[Trial], store: Ledger, minutes: float | None, quiet: bool
) -> Iterator[pool.OnOutcome | None]:
    if quiet:
        yield None
        return
    from cameraready.evidence.execution.progress import progress

    waiting = len(trials) - len(store.finished(t.key for t in trials))
    with progress(waiting, None if minutes is None else 60 * minutes) as on_outcome:
        yield on_outcome
