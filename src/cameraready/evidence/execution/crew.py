"""A crew of worker processes that do tasks, each task under its limits, and whose deaths hurt only the task at hand."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from cameraready.evidence.execution.limits import MEMORY_EXIT
from cameraready.evidence.execution.processes import Undertaker, WorkerContext, start_resource_tracker
from cameraready.evidence.execution.worker import STACK_SIGNAL, job_path, log_path, open_workload, start_worker

_TICK = 0.2  # seconds between looks at the clock while nothing happens
_LOSSES = 3  # how many workers may end before a task has begun until it counts as a death of the task
_OPENING_DEATHS = 3  # how many workers in a row may die while opening a workload before the crew gives way
_LOG_CHARACTERS = 6_000


@dataclass
class Task:
    """A call to make in a worker, on behalf of `subject`."""

    subject: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float
    workload: str = ""  # to be opened first in a worker that has not yet
    losses: int = 0


@dataclass(frozen=True)
class Ending:
    """How a task ended. `text` says why where it is not ``returned``."""

    kind: Literal["returned", "unopened", "raised", "timeout", "memory", "died"]
    value: Any = None
    text: str = ""
    seconds: float = 0.0


@dataclass
class Stop:
    """When to stop: at once (`now`), or by `time.monotonic`: no start after `last_start`, none running after `end`."""

    cancel: threading.Event | None = None
    interrupted: bool = False
    last_start: float = float("inf")
    end: float = float("inf")

    @property
    def now(self) -> bool:
        return self.interrupted or (self.cancel is not None and self.cancel.is_set())

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() >= self.last_start


class Crew:
    """Worker processes that share a job.

    Each worker sits in a pebble pool of its own: workers of one pool share a pipe and its lock, and one that is killed
    while it holds them would take the others along. A worker that ended badly is replaced together with its pool.
    """

    def __init__(self, packed: bytes | None, folder: Path, *, threads: int, open_timeout: float) -> None:
        start_resource_tracker()
        if packed is not None:  # else it lies there already
            job_path(folder).write_bytes(packed)
        self.folder = folder
        self.threads = threads
        self.open_timeout = open_timeout
        self.events: queue.SimpleQueue[tuple[_Worker, int, Future[Any]] | None] = queue.SimpleQueue()
        self.undertaker = Undertaker()
        self.dismissals: list[threading.Thread] = []
        self.notes: list[str] = []  # what a reader of the run's report should know
        self._workers: list[_Worker] = []
        self._looked = 0.0
        self._unopened: dict[str, str] = {}
        self._opening_deaths: Counter[str] = Counter()

    def wake(self) -> None:
        """Make `work` look at its stop conditions now; may be called from a signal handler."""
        self.events.put(None)

    def work(
        self,
        tasks: Iterable[Task],
        hands: int,
        on_end: Callable[[Task, Ending], None],
        stop: Stop,
        *,
        fresh: bool = False,
        feed: Callable[[], Iterable[Task] | None] | None = None,
    ) -> None:
        """Do tasks in order, `hands` at a time, each in a new process where `fresh`, until all have ended or at a stop.

        `on_end` is called in this thread for each task that ended; tasks cut off by a stop have no ending. `feed` is asked
        for more tasks every now and then, and after each `wake`, until it returns None.
        """
        waiting = deque(tasks)
        self._workers = workers = [_Worker(self) for _ in range(hands if feed else min(hands, len(waiting)))]
        try:
            while True:
                if feed is not None:
                    more = feed()
                    waiting.extend(more or ())
                    feed = None if more is None else feed
                if stop.now or time.monotonic() >= stop.end:
                    break
                if not stop.out_of_time:
                    for worker in workers:
                        while waiting and worker.task is None and not worker.retired:
                            self._give(worker, waiting.popleft(), on_end)
                if feed is None and not any(worker.task for worker in workers):
                    break
                self._attend(waiting, on_end, fresh)
                self._look_after(workers, waiting, on_end)
            self._collect_finished(workers, on_end)
        finally:
            for worker in workers:
                worker.dismiss()

    def close(self) -> None:
        """End all workers and wait until they are gone."""
        give_up = time.monotonic() + 10.0
        for thread in self.dismissals:
            thread.join(max(0.0, give_up - time.monotonic()))
        self.undertaker.close()

    def _give(self, worker: _Worker, task: Task, on_end: Callable[[Task, Ending], None]) -> None:
        if task.workload in self._unopened:
            on_end(task, Ending("unopened", text=self._unopened[task.workload]))
        else:
            worker.begin(task)

    def _look_after(self, workers: list[_Worker], waiting: deque[Task], on_end: Callable[[Task, Ending], None]) -> None:
        """See what does not make itself heard."""
        if time.monotonic() - self._looked < _TICK:
            return
        self._looked = time.monotonic()
        for worker in workers:
            worker.ask_for_stack_if_late()
            loss = worker.loss()
            if loss is not None:
                self._settle(worker, loss, waiting, on_end)

    def _attend(self, waiting: deque[Task], on_end: Callable[[Task, Ending], None], fresh: bool) -> None:
        """Wait for news of one worker and act on it."""
        try:
            news = self.events.get(timeout=_TICK)
        except queue.Empty:
            return
        if news is None:
            return
        worker, call, future = news
        if call != worker.call or worker.task is None:
            return  # news of a worker that was dismissed meanwhile
        error = future.exception() if not future.cancelled() else BrokenProcessPool("cancelled")
        if error is not None:
            self._settle(worker, error, waiting, on_end)
            return
        if worker.is_opening:
            self._opened(worker, future.result(), on_end)
            return
        task, ending = worker.task, Ending("returned", future.result(), seconds=worker.elapsed)
        worker.task = None
        if fresh:
            worker.dismiss()
            self.finish_dismissals()
        on_end(task, ending)

    def _opened(self, worker: _Worker, error: str, on_end: Callable[[Task, Ending], None]) -> None:
        task = worker.task
        assert task is not None
        if not error:
            worker.opened.add(task.workload)
            self._opening_deaths[task.workload] = 0
            worker.proceed()
            return
        self._unopened[task.workload] = error
        worker.task = None
        on_end(task, Ending("unopened", text=error))

    def _settle(
        self, worker: _Worker, error: BaseException, waiting: deque[Task], on_end: Callable[[Task, Ending], None]
    ) -> None:
        """A call came to a bad end."""
        task, opening = worker.task, worker.is_opening
        assert task is not None
        worker.task = None
        ending = self._ending(worker, task, error, worker.elapsed, opening)
        if ending.kind != "raised":
            worker.dismiss()
        if opening and ending.kind == "timeout":
            self._unopened[task.workload] = ending.text
            ending = Ending("unopened", text=ending.text)
        elif ending.kind == "died" and (opening or isinstance(error, BrokenProcessPool)):
            task.losses += 1
            if opening:
                self._note_opening_death(worker, task, ending.text)
            if task.losses < _LOSSES and task.workload not in self._unopened:
                waiting.appendleft(task)  # it had not begun
                return
        on_end(task, ending)

    def _note_opening_death(self, worker: _Worker, task: Task, text: str) -> None:
        """A worker died of opening a workload, or while it did. When that happens again and again, something must change."""
        self._opening_deaths[task.workload] += 1
        if self._opening_deaths[task.workload] < _OPENING_DEATHS:
            return
        self._opening_deaths[task.workload] = 0
        if any(other.holds(task.workload) for other in self._workers if other is not worker):
            # There may be no room for it twice: go on with a worker less.
            worker.retired = True
            task.losses = 0
            self.notes.append(f"a worker process less was used: {text}")
        else:
            self._unopened[task.workload] = text

    def _ending(self, worker: _Worker, task: Task, error: BaseException, seconds: float, opening: bool) -> Ending:
        doing = f"opening workload {task.workload!r}" if opening else "the trial"
        log = worker.last_words()
        if isinstance(error, TimeoutError):
            limit = self.open_timeout if opening else task.timeout
            return Ending("timeout", text=f"{doing} was ended after {limit:g} s, its limit{log}", seconds=seconds)
        if isinstance(error, ProcessExpired) and error.exitcode == MEMORY_EXIT:
            return Ending("memory", text=f"{doing} was ended for its use of memory{log}", seconds=seconds)
        if isinstance(error, ProcessExpired):
            return Ending("died", text=f"the process of {doing} {_how_it_ended(error.exitcode)}{log}", seconds=seconds)
        if isinstance(error, BrokenProcessPool):
            return Ending("died", text=f"{_LOSSES} processes ended before {doing} began{log}", seconds=seconds)
        text = getattr(error, "traceback", "") or f"{type(error).__name__}: {error}"
        return Ending("memory" if isinstance(error, MemoryError) else "raised", text=text, seconds=seconds)

    def _collect_finished(self, workers: list[_Worker], on_end: Callable[[Task, Ending], None]) -> None:
        """At a stop: what finished before it counts."""
        while True:
            try:
                news = self.events.get_nowait()
            except queue.Empty:
                return
            if news is None:
                continue
            worker, call, future = news
            if call != worker.call or worker.task is None or worker.is_opening:
                continue
            if not future.cancelled() and future.exception() is None:
                task, worker.task = worker.task, None
                on_end(task, Ending("returned", future.result(), seconds=worker.elapsed))

    def finish_dismissals(self) -> None:
        """Wait for the ends of dismissed workers: nothing else may run beside a trial that is measured."""
        for thread in self.dismissals:
            thread.join(10.0)
        self.dismissals.clear()


@dataclass(eq=False)
class _Worker:
    """One pair of hands: at most one living process, and the task it is at."""

    crew: Crew
    task: Task | None = None
    call: int = 0  # numbers the calls, to tell late news
    opened: set[str] = field(default_factory=set)
    is_opening: bool = False
    retired: bool = False
    _pool: ProcessPool | None = None
    _pids: list[int] = field(default_factory=list)
    _future: Future[Any] | None = None
    _started: float = 0.0
    _asked: int = -1  # the call during which the stack was asked for

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def loss(self) -> BaseException | None:
        """What pebble does not tell: its pool broke, it long missed a deadline, or the worker left with status 0."""
        if self.task is None or self._pool is None or self._future is None or self._future.done():
            return None
        if len(self._pids) > 1 and self._future.running():
            return ProcessExpired("the worker was replaced", code=0, pid=self._pids[0])
        limit = self.crew.open_timeout if self.is_opening else self.task.timeout
        if not self._pool.active or self.elapsed > limit + 30.0:
            return BrokenProcessPool("the worker was lost")
        return None

    def holds(self, workload: str) -> bool:
        """Whether the workload is open here, or being opened."""
        return workload in self.opened or (self.is_opening and self.task is not None and self.task.workload == workload)

    def begin(self, task: Task) -> None:
        self.task = task
        self.is_opening = bool(task.workload) and task.workload not in self.opened
        if self.is_opening:
            self._call(open_workload, (task.workload,), self.crew.open_timeout)
        else:
            self.proceed()

    def proceed(self) -> None:
        assert self.task is not None
        self.is_opening = False
        self._call(self.task.function, self.task.args, self.task.timeout)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> None:
        self.call += 1
        try:
            future = self._schedule(function, args, timeout)
        except (RuntimeError, BrokenProcessPool):
            # The worker was killed while it had nothing to do. The next one has nothing open yet.
            task = self.task
            self.dismiss()
            self.task = task
            if function is not open_workload and task is not None and task.workload:
                self.begin(task)
                return
            future = self._schedule(function, args, timeout)
        call = self.call
        self._started = time.monotonic()
        self._future = future
        future.add_done_callback(lambda done: self.crew.events.put((self, call, done)))

    def _schedule(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Future[Any]:
        if self._pool is None:
            self._pids = pids = []  # this pool's own: it may still begin a worker after it was dismissed

            def note_birth(pid: int) -> None:
                pids.append(pid)
                self.crew.undertaker.watch(pid)

            self._pool = ProcessPool(
                max_workers=1,
                initializer=start_worker,
                initargs=(str(self.crew.folder),),
                context=WorkerContext(self.crew.threads, note_birth),
            )
        return self._pool.schedule(function, args=args, timeout=timeout if timeout != float("inf") else None)

    def ask_for_stack_if_late(self) -> None:
        """Shortly before a trial is ended for being late, have its worker write down where it is."""
        if self.task is None or self.is_opening or not self.task.workload or self._asked == self.call or not self._pids:
            return
        if STACK_SIGNAL is not None and self.elapsed > self.task.timeout - max(3 * _TICK, 0.01 * self.task.timeout):
            self._asked = self.call
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[0], STACK_SIGNAL)

    def last_words(self) -> str:
        """The end of what the worker printed during its last trial, the stack at a crash included."""
        if not self._pids:
            return ""
        try:
            text = log_path(self.crew.folder, self._pids[0]).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""
        return f"; the last it wrote:\n{text[-_LOG_CHARACTERS:]}" if text else ""

    def dismiss(self) -> None:
        """End the process, and all that it started, without waiting."""
        pool, pids = self._pool, self._pids
        self._pool, self._pids, self._future, self.task = None, [], None, None
        self.call += 1
        self.opened = set()
        if pool is not None:
            thread = threading.Thread(target=_dismiss, args=(pool, pids, self.crew.undertaker), daemon=True)
            thread.start()
            self.crew.dismissals.append(thread)


def _dismiss(pool: ProcessPool, pids: list[int], undertaker: Undertaker) -> None:
    pool.stop()
    for pid in list(pids):
        undertaker.bury(pid)
    pool.join()
    for pid in pids:  # the pool may have begun a new worker meanwhile
        undertaker.bury(pid)


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
