"""A run on a cluster, as the driver sees it: hands out trials, records what comes back, and ends when it should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cameraready.evidence.execution.cluster import cargo
from cameraready.evidence.execution.cluster.field import Field, News
from cameraready.evidence.execution.cluster.link import Link, LinkLost, attempts_unlogged, resolve
from cameraready.evidence.execution.cluster.passport import Terms, locks_of, passport
from cameraready.evidence.execution.cluster.roster import Setup
from cameraready.evidence.execution.crew import Stop
from cameraready.evidence.execution.pool import Tally, interrupts_noted, phases
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.outcomes import Trial
from cameraready.evidence.specs import Spec
from cameraready.evidence.subject import UsageError

if TYPE_CHECKING:
    from cameraready.evidence.study import Study

#: Seconds that a run waits while it has no host; this variable sets another number.
WAIT_VARIABLE = "CAMERAREADY_CLUSTER_WAIT"
WAIT_SECONDS = 600.0
_CLOSE_SECONDS = 15.0

T = TypeVar("T")
Say = Callable[[str], None]


class Session:
    """The hosts of a run, from the first trial to the last. A context: hosts are let go at its end."""

    def __init__(self, address: str, security: Any, setup: Setup, say: Say) -> None:
        self._address = address
        self._security = security
        self._setup = setup
        self._say = say
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._started: Future[Field] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run_loop, name="cluster", daemon=True)
        self._gave_up = ""

    def __enter__(self) -> Session:
        self._thread.start()
        self._field = self._started.result()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_CLOSE_SECONDS)

    @property
    def hosts(self) -> dict[str, int]:
        """Trials that each host did."""
        return dict(self._field.done)

    @property
    def notes(self) -> list[str]:
        """What a reader of the results should know."""
        found = [*self._field.roster.notes, *self._field.notes]
        return [*found, self._gave_up] if self._gave_up else found

    def run(
        self,
        trials: Sequence[Trial],
        job: Job,
        tally: Tally,
        jobs: int | None,
        minutes: float | None,
        cancel: threading.Event | None,
    ) -> tuple[bool, bool]:
        """Run trials as `pool.run_trials` does; returns whether the run was interrupted, and whether it ran out of time."""
        stop = Stop(cancel)
        ran_out = False
        with interrupts_noted(self.wake, stop):
            for batch, last_start, end in phases(trials, minutes):
                if stop.now:
                    break
                stop.last_start, stop.end = last_start, end
                ran_out |= not self._run_batch(batch, tally, stop) and not stop.now
        return stop.now, ran_out

    def wake(self) -> None:
        """Look at the stop conditions now; may be called from a signal handler."""
        self._news.put(("wake", None))

    def prepare_workloads(
        self, digests: Mapping[str, str], folder: Path, *, on_prepared: Callable[[str, str], None]
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """What `pool.prepare_workloads` does, on the hosts; the arrays come here, too."""
        paths = {name: folder / f"{digest}.npz" for name, digest in digests.items()}
        missing = {name for name, path in paths.items() if not path.exists()}
        errors: dict[str, str] = {}
        stop = Stop()
        with interrupts_noted(self.wake, stop):
            work = [self._start(self._field.prepare(name)) for name in sorted(missing)]
            for kind, value in self._hear(stop) if missing else ():
                if kind == "prepared":
                    name, error = value
                    missing.discard(name)
                    errors |= {name: error} if error else {}
                    on_prepared(name, error)
                if not missing:
                    break
            for each in work:
                each.cancel()
        if stop.now:
            raise KeyboardInterrupt
        return {name: path for name, path in paths.items() if path.exists()}, errors

    def _run_batch(self, trials: Sequence[Trial], tally: Tally, stop: Stop) -> bool:
        """Returns whether all trials ended."""
        left = len(trials)
        over = False
        try:
            self._wait_for(self._field.begin(trials))
            intake = True
            for kind, value in self._hear(stop):
                if kind == "outcome":
                    tally.add(*value)
                    left -= 1
                over = kind == "over"
                if over or time.monotonic() >= stop.end:
                    break
                if intake and stop.out_of_time:
                    intake = False
                    self._wait_for(self._field.end_intake())
        finally:
            if not over:
                # At an interrupt there is no need to wait for the hosts: they are let go in a moment.
                self._wait_for(self._field.end_batch(cut=not stop.now))
        for kind, value in self._what_is_there():
            if kind == "outcome":  # it came while the rest was cut off
                tally.add(*value)
                left -= 1
        return left == 0

    def _hear(self, stop: Stop) -> Iterator[News]:
        """News from the cluster, with a ``tick`` now and then, until a stop. What is fatal is raised."""
        while not stop.now:
            try:
                kind, value = self._news.get(timeout=0.2)
            except queue.Empty:
                kind, value = "tick", None
            if kind == "say":
                self._say(value)
            elif kind == "failed":
                raise value
            elif kind == "gave up":
                self._gave_up = value
                self._say(value)
                stop.interrupted = True
            else:
                yield kind, value

    def _what_is_there(self) -> Iterator[News]:
        while not self._news.empty():
            yield self._news.get()

    # --- the event loop's thread ------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:
            if self._started.done():
                self._news.put(("failed", error))
            else:
                self._started.set_exception(error)

    async def _keep(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        field = Field(self._address, self._security, self._setup, self._news, waiting_seconds())
        with attempts_unlogged():
            await field.connect()
            keeping = asyncio.create_task(field.keep())
            self._started.set_result(field)
            await self._over.wait()
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping


def waiting_seconds() -> float:
    """How long a run without hosts waits. Raises `UsageError` where the variable holds no number."""
    text = os.environ.get(WAIT_VARIABLE, "")
    try:
        return float(text) if text else WAIT_SECONDS
    except ValueError:
        raise UsageError(f"{WAIT_VARIABLE} must be a number of seconds, got {text!r}") from None


def reach(scheduler: Any) -> tuple[str, Any]:
    """Address and security of a scheduler that answers.

    Raises
    ------
    UsageError
        It does not answer, is no scheduler, or the extra is not installed.
    """
    address, security = resolve(scheduler)
    waiting_seconds()
    answer: Future[None] = Future()

    async def knock() -> None:
        with attempts_unlogged():
            await (await Link.open(address, security)).close()

    def try_it() -> None:
        try:
            answer.set_result(asyncio.run(knock()))
        except BaseException as error:
            answer.set_exception(error)

    # In a thread of its own: a notebook's thread has an event loop already.
    threading.Thread(target=try_it, name="cluster-reach", daemon=True).start()
    try:
        answer.result()
    except LinkLost as error:
        raise UsageError(f"no Dask scheduler answers at {address} ({error})") from error
    return address, security


def setup_of(
    job: Job, study: Study, trials: Sequence[Trial], digests: Mapping[str, str], folder: Path, jobs: int | None
) -> Setup:
    """What the hosts of a run have to be told.

    Parameters
    ----------
    digests : mapping
        Of what the workloads' prepared arrays depend on; they lie in `folder` under these names.

    Raises
    ------
    UsageError
        Something of the user's cannot be sent to another machine.
    """
    if not isinstance(job.study, str):
        raise UsageError("a study that is not in a module cannot run on a cluster; name it as package.module:STUDY")
    arms = sorted({study.method if trial.arm in job.own else trial.arm for trial in trials})
    own_content = {name: spec for name, spec in job.specs.items() if _is_looked_up_there(spec)}
    terms = Terms(job.study, arms, own_content, locks_of(job.study))
    try:
        items = cargo.packed(job, digests)
    except TypeError as error:
        raise UsageError(f"{error}; a cluster cannot run it") from error
    return Setup(
        terms=terms,
        passport=passport(terms),
        items=items,
        prepared={
            name: (f"{cargo.PREPARED}/{digest}.npz", folder / f"{digest}.npz") for name, digest in digests.items()
        },
        jobs=jobs,
        threads=job.threads,
        open_timeout=job.open_timeout,
        timeout=job.timeout,
    )


def _is_looked_up_there(spec: Any) -> bool:
    """Whether a workload is found on each host by its name; files and objects are sent."""
    return isinstance(spec, Spec) and spec.kind != "value" and not spec.path
