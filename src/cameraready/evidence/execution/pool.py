"""Runs trials in worker processes and records what becomes of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cameraready.evidence.execution.processes import usable_cores
from cameraready.evidence.execution.worker import Job, Stage, prepare_workload, run_trial
from cameraready.evidence.outcomes import Outcome, Trial

if TYPE_CHECKING:
    from cameraready.evidence.execution.crew import Crew, Ending, Stop, Task
    from cameraready.evidence.execution.ledger import Ledger

OnOutcome = Callable[[Trial, Outcome], None]
#: Runs trials and returns whether it was interrupted, and whether time ran out: given trials, job, where to record them,
#: worker processes, minutes, and what cancels it.
Runner = Callable[
    [Sequence[Trial], Job, "Tally", int, float | None, threading.Event | None],
    tuple[bool, bool],
]

#: Share of the time that trials which need the machine to themselves are sure to have.
ALONE_SHARE = 1 / 3
_FOLDER_PREFIX = "cameraready-run-"
_FOLDER_LOCK = "lock"
_FOLDER_AGE = 60.0  # seconds before a folder without a lock counts as abandoned


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes
    ----------
    done, failed : int
        Trials that ended in this run, with rows and without.
    skipped : int
        Trials that the ledger already held.
    remaining : int
        Trials still to run.
    interrupted, ran_out : bool
        Whether the run was stopped by hand, or by its time limit.
    seconds : float
    notes : tuple of str
        What a reader of the results should know, such as that fewer worker processes were used than asked for.
    """

    done: int
    failed: int
    skipped: int
    remaining: int
    interrupted: bool
    ran_out: bool
    seconds: float
    notes: tuple[str, ...] = ()


def run_trials(
    trials: Sequence[Trial],
    job: Job,
    ledger: Ledger,
    run: int,
    *,
    jobs: int | None = None,
    minutes: float | None = None,
    on_outcome: OnOutcome | None = None,
    cancel: threading.Event | None = None,
    in_process: bool = False,
    runner: Runner | None = None,
) -> Summary:
    """Run the trials that the ledger does not hold yet, and record each as soon as it ends.

    Trials start in the order given; those that are to be alone come after the others, one by one, each in a new
    process. Ctrl-C (in the main thread) and `cancel` stop the run cleanly: what has finished is kept, what was running
    is cut off and not recorded.

    Parameters
    ----------
    run : int
        Number of the run, from `Ledger.start_run`.
    jobs : int, optional
        Worker processes at a time; as many as there are usable cores by default.
    minutes : float, optional
        Time limit. No trial starts after it; one that is running then may go on for a tenth of the limit. Trials that
        are to be alone are sure of the last third.
    on_outcome : callable, optional
        ``on_outcome(trial, outcome)``, called in this thread after the outcome was committed.
    in_process : bool
        Run in this process, one by one, without enforcing limits of time and memory: for seconds-long checks, and for
        objects that cannot be sent to another process.
    runner : callable, optional
        What runs them elsewhere (on a cluster); `jobs` is its business then.

    Raises
    ------
    LedgerError
        An outcome could not be recorded (a full disk); the workers are ended, what was recorded before is kept.
    TypeError
        Something of the user's cannot be sent to worker processes.
    """
    unique = list({trial.key: trial for trial in trials}.values())
    held = ledger.finished(trial.key for trial in unique)
    waiting = [trial for trial in unique if trial.key not in held]
    tally = Tally(ledger, run, on_outcome)
    started = time.monotonic()
    interrupted, ran_out = False, False
    if waiting:
        runner = runner or (_run_here if in_process else _run_in_workers)
        interrupted, ran_out = runner(waiting, job, tally, jobs or usable_cores(), minutes, cancel)
    return Summary(
        done=tally.done,
        failed=tally.failed,
        skipped=len(held),
        remaining=len(waiting) - tally.done - tally.failed,
        interrupted=interrupted,
        ran_out=ran_out,
        seconds=time.monotonic() - started,
        notes=tuple(tally.notes),
    )


def prepare_workloads(
    job: Job,
    digests: Mapping[str, str],
    folder: Path,
    *,
    jobs: int | None = None,
    timeout: float = float("inf"),
    on_prepared: Callable[[str, str], None] | None = None,
    cancel: threading.Event | None = None,
    in_process: bool = False,
) -> tuple[dict[str, Path], dict[str, str]]:
    """Compute what the study's `prepare` returns, for every workload whose arrays are not in the cache yet.

    Parameters
    ----------
    digests : mapping
        A digest of all that the arrays depend on (content, code, versions), by workload.
    folder : Path
        The cache; files are named by digest.
    timeout : float
        Seconds that one workload may take.
    on_prepared : callable, optional
        ``on_prepared(workload, error)`` after each, with ``""`` for no error.

    Returns
    -------
    paths, errors
        Files by workload for `Job.prepared`, and the reason for each workload that has none.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, once the workers are gone. What was prepared is kept.
    """
    paths = {name: folder / f"{digest}.npz" for name, digest in digests.items()}
    missing = [name for name, path in paths.items() if not path.exists()]
    errors: dict[str, str] = {}

    def note(name: str, error: str) -> None:
        if error:
            errors[name] = error
        if on_prepared is not None:
            on_prepared(name, error)

    if missing and in_process:
        with scratch_folder() as scratch, _own_threads(job.threads):
            stage = Stage(job, scratch)
            for name in missing:
                note(name, stage.try_to_prepare(name, paths[name]))
            stage.close()
    elif missing:
        from cameraready.evidence.execution.crew import Task

        tasks = [Task(name, prepare_workload, (name, paths[name]), timeout) for name in missing]
        with _crew(job, cancel) as (crew, stop):
            crew.work(
                tasks,
                jobs or usable_cores(),
                lambda task, ending: note(task.subject, ending.value if ending.kind == "returned" else ending.text),
                stop,
            )
        if stop.interrupted:
            raise KeyboardInterrupt
    ready = {name: path for name, path in paths.items() if path.exists()}
    return ready, errors | {
        name: "cancelled before it was prepared" for name in paths if name not in ready and name not in errors
    }


class Tally:
    """Records outcomes and counts them."""

    def __init__(self, ledger: Ledger, run: int, on_outcome: OnOutcome | None) -> None:
        self._ledger = ledger
        self._run = run
        self._on_outcome = on_outcome
        self.done = 0
        self.failed = 0
        self.notes: list[str] = []

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self._ledger.record(trial, outcome, self._run)
        if outcome.status == "done":
            self.done += 1
        else:
            self.failed += 1
        if self._on_outcome is not None:
            self._on_outcome(trial, outcome)


def _run_in_workers(
    trials: Sequence[Trial], job: Job, tally: Tally, jobs: int, minutes: float | None, cancel: threading.Event | None
) -> tuple[bool, bool]:
    from cameraready.evidence.execution.crew import Task

    def on_end(task: Task, ending: Ending) -> None:
        tally.add(task.subject, outcome_of(task.subject, ending))

    ran_out = False
    with _crew(job, cancel) as (crew, stop):
        for batch, last_start, end in phases(trials, minutes):
            if stop.now:
                break
            stop.last_start, stop.end = last_start, end
            tasks = [Task(trial, run_trial, (trial,), job.timeout, trial.workload) for trial in batch]
            before = tally.done + tally.failed
            alone = batch[0].alone
            if alone:
                crew.finish_dismissals()
            crew.work(tasks, 1 if alone else jobs, on_end, stop, fresh=alone)
            ran_out |= not stop.now and tally.done + tally.failed - before < len(batch)
        tally.notes.extend(crew.notes)
        return stop.now, ran_out


def phases(trials: Sequence[Trial], minutes: float | None) -> Iterator[tuple[list[Trial], float, float]]:
    """Trials that may run together, then those that run alone; when the last may start, and when all is over.

    Both by `time.monotonic`, reckoned from the first call.
    """
    limit = minutes * 60.0 if minutes is not None else float("inf")
    grace = limit / 10 if minutes is not None else 0.0
    started = time.monotonic()
    shared = [trial for trial in trials if not trial.alone]
    alone = [trial for trial in trials if trial.alone]
    if shared:
        last_start = started + (limit * (1 - ALONE_SHARE) if alone else limit)
        yield shared, last_start, last_start + grace
    if alone:
        yield alone, started + limit, started + limit + grace


def outcome_of(trial: Trial, ending: Ending) -> Outcome:
    """What becomes of a trial whose task ended so."""
    if ending.kind == "returned":
        return ending.value
    if ending.kind == "unopened":
        return Outcome(trial.key, "raised", error=ending.text, final=False)
    return Outcome(trial.key, ending.kind, seconds=ending.seconds, error=ending.text, final=ending.kind != "died")


def _run_here(
    trials: Sequence[Trial], job: Job, tally: Tally, jobs: int, minutes: float | None, cancel: threading.Event | None
) -> tuple[bool, bool]:
    last_start = time.monotonic() + (minutes * 60.0 if minutes is not None else float("inf"))
    with scratch_folder() as scratch, _own_threads(job.threads):
        stage = Stage(job, scratch)
        try:
            for trial in trials:
                if cancel is not None and cancel.is_set():
                    return True, False
                if time.monotonic() >= last_start:
                    return False, True
                tally.add(trial, stage.run(trial))
        except KeyboardInterrupt:
            return True, False
        finally:
            stage.close()
    return False, False


@contextlib.contextmanager
def _crew(job: Job, cancel: threading.Event | None) -> Iterator[tuple[Crew, Stop]]:
    from cameraready.evidence.execution.crew import Crew, Stop

    packed = job.packed()
    with scratch_folder() as scratch:
        crew = Crew(packed, scratch, threads=job.threads, open_timeout=job.open_timeout)
        stop = Stop(cancel)
        with interrupts_noted(crew.wake, stop):
            try:
                yield crew, stop
            finally:
                crew.close()


@contextlib.contextmanager
def interrupts_noted(wake: Callable[[], None], stop: Stop) -> Iterator[None]:
    """Ctrl-C sets a flag instead of raising wherever the driver happens to be, in the middle of a commit for one."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return

    def note(number: int, frame: Any) -> None:
        stop.interrupted = True
        wake()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _own_threads(threads: int) -> Iterator[None]:
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads):
        yield


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the run, only for this user, which is locked as long as this process lives."""
    _clear_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    try:
        with open(folder / _FOLDER_LOCK, "w") as lock:
            _try_to_lock(lock)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_abandoned_folders() -> None:
    """Remove the folders of drivers that were killed: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        # Another user's folder cannot be opened; one that was just made may not be locked yet.
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _FOLDER_AGE:
                with open(folder / _FOLDER_LOCK, "a") as lock:
                    abandoned = _try_to_lock(lock)
                if abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


def _try_to_lock(file: IO[str]) -> bool:
    if os.name != "posix":
        return False  # Windows: its temporary folder is cleared by the system
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
