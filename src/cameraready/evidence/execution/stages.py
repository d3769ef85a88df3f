"""Runs the trials of a plan: workloads are prepared before their trials, and a time limit is spent where it gives verdicts."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.execution import key, pool
from cameraready.evidence.execution.ledger import Ledger, data_folder
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.outcomes import Trial
from cameraready.evidence.planning import Load
from cameraready.evidence.subject import Subject

if TYPE_CHECKING:
    from cameraready.evidence.execution.cluster.session import Session

Say = Callable[[str], None]


@dataclass
class Conduct:
    """How a run went. `unprepared` tells why a workload could not be prepared."""

    interrupted: bool = False
    ran_out: bool = False
    unprepared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hosts: dict[str, int] = field(default_factory=dict)  # trials by host, on a cluster


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
    scheduler: Any = None,
) -> Conduct:
    """Prepare the workloads that trials need, and run the trials that the ledger does not hold.

    Without a time limit everything is prepared first and all trials run in one go. With one, the trials run in the plan's
    order, workload by workload, each prepared when its turn comes; the last third of the time is kept for trials that run
    alone. With a `scheduler` (`cluster.session.reach`) both happen on the hosts of its cluster.
    """
    conduct = Conduct()
    started = time.monotonic()
    with (
        _cluster(scheduler, subject, job, loads, trials, store, jobs, say) as session,
        _progress(trials, store, minutes, quiet) as on_outcome,
    ):
        for stage, share in _stages(trials, minutes):
            left = None if minutes is None else minutes * share - (time.monotonic() - started) / 60
            if left is not None and left <= 0:
                conduct.ran_out = True
                continue
            ready, errors = prepare(
                subject, job, loads, stage, store, jobs=jobs, in_process=in_process, say=say, session=session
            )
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
                runner=session.run if session is not None else None,
            )
            conduct.ran_out |= summary.ran_out
            conduct.notes += summary.notes
            if summary.interrupted:
                conduct.interrupted = True
                break
    if session is not None:
        conduct.hosts = session.hosts
        conduct.notes += session.notes
    return conduct


@contextlib.contextmanager
def _cluster(
    scheduler: Any,
    subject: Subject,
    job: Job,
    loads: Sequence[Load],
    trials: Sequence[Trial],
    store: Ledger,
    jobs: int | None,
    say: Say,
) -> Iterator[Session | None]:
    """The cluster that trials run on; None where no scheduler was given, or nothing is left to run."""
    if scheduler is None or len(store.finished(t.key for t in trials)) == len({t.key for t in trials}):
        yield None
        return
    from cameraready.evidence.execution.cluster.session import Session, setup_of

    digests = prepared_digests(subject, loads)
    setup = setup_of(job, subject.study, trials, digests, prepared_folder(), jobs)
    address, security = scheduler
    with Session(address, security, setup, say) as session:
        yield session


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
    session: Session | None = None,
) -> tuple[Job, Mapping[str, str]]:
    """The job with the prepared arrays of the workloads that have trials to run; and what could not be prepared, and why."""
    if subject.study.prepare is None:
        return job, {}
    finished = store.finished(t.key for t in trials)
    needed = {t.workload for t in trials if t.key not in finished}
    digests = {name: digest for name, digest in prepared_digests(subject, loads).items() if name in needed}

    def tell(name: str, error: str) -> None:
        say(f"prepared {name}" if not error else f"{name} could not be prepared: {error.strip().splitlines()[-1]}")

    folder = prepared_folder()
    missing = [name for name, digest in digests.items() if not (folder / f"{digest}.npz").exists()]
    if missing:
        say(f"preparing {', '.join(missing)} (once; kept for the next runs)")
    if session is not None:
        _, errors = session.prepare_workloads(digests, folder, on_prepared=tell)
        return job, errors  # the hosts' job knows where the arrays will be
    paths, errors = pool.prepare_workloads(job, digests, folder, jobs=jobs, on_prepared=tell, in_process=in_process)
    return replace(job, prepared=paths), errors


def prepared_digests(subject: Subject, loads: Sequence[Load]) -> dict[str, str]:
    """Names of the files with prepared arrays, by workload: digests of all that the arrays depend on."""
    if subject.study.prepare is None:
        return {}
    versions = key.arm_versions(subject.study, "*", subject.folder)
    return {
        load.name: key.trial_key(
            code=subject.code, content=load.digest, condition={"prepare": True}, seed=0, versions=versions
        )
        for load in loads
    }


def prepared_folder() -> Path:
    """Where prepared arrays are kept for the next runs."""
    folder = data_folder() / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
