"""What happens inside a worker process: workloads and peers are opened once and kept, trials are run."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import math
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.execution.limits import MemoryGuard, peak_mb, start_peak
from cameraready.evidence.execution.storable import load_arrays, plain_rows, rows_of, save_arrays
from cameraready.evidence.outcomes import Outcome, Status, Trial

if TYPE_CHECKING:
    from cameraready.evidence.context import Context
    from cameraready.evidence.specs import Spec
    from cameraready.evidence.study import Study

#: On this signal a worker writes its stack to its log; the driver sends it before it ends a trial that is late.
STACK_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know to run any trial of a run.

    Attributes
    ----------
    study : str or Study
        ``"package.module:STUDY"``; or the study itself, which is then sent by value.
    specs : mapping
        The spec of every workload, by the name that trials use.
    own_workloads : frozenset of str
        Names of the workloads that are the user's.
    own : mapping
        The user's own arms, by name. Specs and arms may hold any objects that `cloudpickle` can send.
    device, dtype : str
        What the user asked for.
    without : frozenset of str
        Arms left out.
    prepared : mapping
        Paths of the ``.npz`` files with the workloads' prepared arrays, by workload.
    threads : int
        Threads that numerical libraries may use in a worker.
    timeout, open_timeout : float
        Seconds that one trial, and the opening of one workload, may take.
    memory : float
        GiB that one trial may take beyond what the worker held before it; 0 sets no limit.
    shipped : bool
        Files were shipped with the job: paths of specs and prepared arrays are relative to the run's folder.
    """

    study: str | Study
    specs: Mapping[str, Spec]
    own_workloads: frozenset[str] = frozenset()
    own: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = ""
    without: frozenset[str] = frozenset()
    prepared: Mapping[str, Path | str] = field(default_factory=dict)
    threads: int = 1
    timeout: float = 600.0
    open_timeout: float = 3600.0
    memory: float = 4.0
    shipped: bool = False

    def packed(self) -> bytes:
        """The job as bytes for the workers.

        Raises
        ------
        TypeError
            Something of the user's cannot be sent to another process; the sentence names it.
        """
        import cloudpickle

        try:
            return cloudpickle.dumps(self)
        except Exception as error:
            raise TypeError(self._whatever_cannot_be_sent(error)) from error

    def _whatever_cannot_be_sent(self, error: Exception) -> str:
        import cloudpickle

        for kind, things in (("workload", self.specs), ("own method", self.own)):
            for name, thing in things.items():
                try:
                    cloudpickle.dumps(thing)
                except Exception as reason:
                    return (
                        f"the {kind} {name!r} cannot be sent to worker processes ({reason}); give it as"
                        " package.module:object, or run in this process"
                    )
        return f"the study cannot be sent to worker processes ({error})"


class Stage:
    """Where trials run: a process's opened study, workloads and peers."""

    def __init__(self, job: Job, scratch: Path, *, guarded: bool = False) -> None:
        self.job = job
        self._scratch = scratch
        self._guard = MemoryGuard() if guarded else None
        self._study: Study | None = None
        self._workloads: dict[str, Any] = {}
        self._unopened: dict[str, Exception] = {}
        self._prepared: dict[str, Mapping[str, Any]] = {}
        self._peers: dict[str, Any] = {}
        self._empty: Path | None = None

    @property
    def study(self) -> Study:
        if self._study is None:
            self._study = load_study(self.job.study)
        return self._study

    def open(self, name: str) -> Any:
        """The workload of that name, opened by the study when first asked for."""
        if name in self._unopened:
            raise self._unopened[name]
        if name not in self._workloads:
            try:
                self._workloads[name] = self.study.open(self.job.specs[name])
            except Exception as error:
                self._unopened[name] = error  # trying again for each of a thousand trials would help nobody
                raise
        return self._workloads[name]

    def prepared(self, name: str) -> Mapping[str, Any]:
        """The workload's prepared arrays."""
        if name not in self._prepared:
            path = self.job.prepared.get(name)
            self._prepared[name] = load_arrays(Path(path)) if path is not None else {}
        return self._prepared[name]

    def prepare(self, name: str, path: Path) -> None:
        """Run the study's `prepare` on a workload and keep its arrays at `path`."""
        if self.study.prepare is None:
            raise ValueError("the study has no prepare function")
        with self._empty_folder() as folder:
            arrays = self.study.prepare(self.open(name), self._context(name, 0, folder, math.inf))
        save_arrays(arrays, path)

    def try_to_prepare(self, name: str, path: Path) -> str:
        """`prepare`, with the error as text; ``""`` where there is none."""
        try:
            self.prepare(name, path)
        except Exception as error:
            return _traceback(error)
        return ""

    def run(self, trial: Trial) -> Outcome:
        """Run one trial. Whatever it does, an outcome comes back, unless it ends the process."""
        try:
            workload, prepared = self.open(trial.workload), self.prepared(trial.workload)
        except Exception as error:
            return Outcome(trial.key, "raised", error=_opening_failed(trial.workload, error), final=False)
        try:
            for peer in self.study.peers_of(trial.arm):  # starting it is no part of the trial's time
                self._open_peer(peer.name)
        except Exception as error:
            return Outcome(trial.key, "raised", error=_traceback(error), final=False)
        with self._empty_folder() as folder:
            context = self._context(trial.workload, trial.seed, folder, self.job.timeout, prepared)
            return self._run(trial, workload, context)

    def _run(self, trial: Trial, workload: Any, context: Context) -> Outcome:
        failure: BaseException | None = None
        returned: Any = None
        limit = self._guard.limit(self.job.memory) if self._guard else contextlib.nullcontext()
        start_peak()
        started = time.perf_counter()
        try:
            with limit:
                returned = self.study.trial(workload, context, **trial.condition)
                if isinstance(returned, Iterator):
                    returned = list(returned)  # a generator does the trial's work here
        except BaseException as error:
            if self._guard is None and isinstance(error, KeyboardInterrupt):
                raise  # in the user's own process Ctrl-C means the run, not the trial
            failure = error
        seconds = time.perf_counter() - started
        peak = max(peak_mb(), self._guard.seen_mb if self._guard else 0.0)
        if failure is None:
            try:
                return Outcome(trial.key, "done", plain_rows(rows_of(returned), trial.condition), seconds, peak)
            except (TypeError, ValueError) as error:
                return Outcome(trial.key, "raised", (), seconds, peak, f"{type(error).__name__}: {error}")
        status: Status = "memory" if _is_out_of_memory(failure) else "raised"
        final = type(failure).__name__ != "PeerUnavailable"  # which says nothing about the trial
        return Outcome(trial.key, status, (), seconds, peak, _traceback(failure), final)

    def _context(
        self, workload: str, seed: int, folder: Path, timeout: float, prepared: Mapping[str, Any] | None = None
    ) -> Context:
        from cameraready.evidence.context import Context

        return Context(
            seed=seed,
            device=self.job.device,
            dtype=self.job.dtype,
            scratch=folder,
            deadline=time.monotonic() + timeout,
            prepared=prepared or {},
            own=self.job.own,
            without=self.job.without,
            is_own_workload=workload in self.job.own_workloads,
            open_peer=self._open_peer,
        )

    @contextlib.contextmanager
    def _empty_folder(self) -> Iterator[Path]:
        if self._empty is None:
            self._empty = Path(tempfile.mkdtemp(prefix="trial-", dir=self._scratch))
        folder = self._empty
        try:
            yield folder
        finally:
            if not folder.is_dir() or any(os.scandir(folder)):  # most trials leave it empty, for the next one
                self._empty = None
                shutil.rmtree(folder, ignore_errors=True)  # what resists goes with the run's folder

    def _open_peer(self, name: str) -> Any:
        if name not in self._peers or self._peers[name].closed:  # its process may have ended in an earlier trial
            from cameraready.evidence.peers.environments import open_peer
            from cameraready.evidence.study import study_folder

            self._peers[name] = open_peer(self.study.peer(name), study_folder(self.study))
        return self._peers[name]

    def close(self) -> None:
        """End the peers and remove the scratch folder."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._empty is not None:
            shutil.rmtree(self._empty, ignore_errors=True)
            self._empty = None


def load_study(reference: str | Study) -> Study:
    """The study behind ``"package.module:STUDY"``."""
    if not isinstance(reference, str):
        return reference
    name, _, attribute = reference.partition(":")
    module = importlib.import_module(name)
    if not hasattr(module, attribute or "STUDY"):
        raise AttributeError(f"module {name} has no study named {attribute or 'STUDY'!r}")
    return getattr(module, attribute or "STUDY")


def _traceback(error: BaseException) -> str:
    # The first frame is this file's and tells the reader nothing.
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _opening_failed(workload: str, error: BaseException) -> str:
    return f"workload {workload!r} did not open\n{_traceback(error)}"


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        # What C++ libraries (boosted trees, torch) make of a refused allocation.
        if any(mark in str(error) for mark in ("bad_alloc", "can't allocate memory", "Cannot allocate memory")):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


# What the pool calls in a worker process. One stage per process; the pool's tasks carry only names and trials.
_folder = Path()
_stage: Stage | None = None


def start_worker(folder: str) -> None:
    """Settle a new worker process: its group, its log. The job is unpacked later, where a failure can be told."""
    global _folder
    from cameraready.evidence.execution.processes import live_in_own_group

    live_in_own_group()
    # What trials and libraries print must not reach the driver's output, whose first line is the answer. The end of it,
    # with the stack at a crash or a timeout, is shown with a failed trial.
    log = os.open(log_path(Path(folder), os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=2)
    _folder = Path(folder)


def open_workload(name: str) -> str:
    """Open a workload in this worker; returns the error as text, ``""`` where there is none."""
    try:
        stage = _the_stage()
        stage.open(name)
        stage.prepared(name)
    except Exception as error:
        return _opening_failed(name, error)
    return ""


def prepare_workload(name: str, path: Path) -> str:
    """Run `prepare` on a workload in this worker; returns the error as text, ``""`` where there is none."""
    return _the_stage().try_to_prepare(name, path)


def load_job() -> str:
    """Unpack the job and import its study in this worker; returns the error as text, ``""`` where there is none."""
    try:
        _ = _the_stage().study
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_trial(trial: Trial) -> Outcome:
    """Run a trial in this worker."""
    os.ftruncate(2, 0)  # what a worker prints is shown with the trial that printed it
    return _the_stage().run(trial)


def _the_stage() -> Stage:
    global _stage
    if _stage is None:
        import cloudpickle

        job = cloudpickle.loads(job_path(_folder).read_bytes())
        if job.shipped:
            from cameraready.evidence.execution.cluster.cargo import placed

            job = placed(job, _folder)
        _stage = Stage(job, _folder, guarded=True)
    return _stage


def job_path(folder: Path) -> Path:
    """Where workers find the job of their run. It may hold gigabytes of the user's, so it does not go through pipes."""
    return folder / "job.pickle"


def log_path(folder: Path, pid: int) -> Path:
    """Where worker `pid` writes what it prints."""
    return folder / f"worker-{pid}.log"
