"""What Dask calls in its workers: each function is a task that passes a request on to the host process of a run.

`stay` is that process's life: a task that lasts as long as the driver wants it. Dask cancels it when the driver is
gone, however it went, and a Dask worker that loses its scheduler ends; both end the host process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cameraready.evidence.execution.cluster import wire
from cameraready.evidence.execution.cluster.host import Begin
from cameraready.evidence.execution.cluster.passport import Terms
from cameraready.evidence.execution.processes import kill_group, usable_cores
from cameraready.evidence.outcomes import Outcome, Trial

_LOOK_EVERY = 0.25  # seconds between looks at whether a host is still wanted
_APPEARS_WITHIN = 60.0  # seconds that a request waits for its host process to be started
_ENDS_WITHIN = 15.0  # seconds that a host process may take to end its workers


class HostGone(RuntimeError):
    """The host process of a run has ended, or was never there."""


@dataclass(frozen=True)
class Arrival:
    """What a host says of itself. `machine` is the same for Dask workers that share one."""

    passport: dict[str, str]
    name: str
    machine: str
    cores: int


class _Home:
    """A host process, and the requests that wait for its answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cameraready.evidence.execution.cluster.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the Dask worker, whose end is the host's
        )
        self.folder = Path()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._gone = False
        threading.Thread(target=self._listen, name="cameraready-answers", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return not self._gone

    def ask(self, kind: str, *args: Any) -> Any:
        """The host's answer to a request. Raises `HostGone`, or `RuntimeError` with the host's traceback."""
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                raise HostGone("the host process has ended")
            number = next(self._numbers)
            self._waiting[number] = future
        with contextlib.suppress(OSError), self._sending:  # its end is told to all who wait, by the listener
            wire.send(self._process.stdin, (number, kind, *args))  # type: ignore[arg-type]
        return future.result()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, kind, value = wire.receive(self._process.stdout)  # type: ignore[arg-type]
                future = self._waiting.pop(number)
                if kind == "ok":
                    future.set_result(value)
                else:
                    future.set_exception(RuntimeError(value))
        with self._lock:
            self._gone = True
            left, self._waiting = self._waiting, {}
        for future in left.values():
            future.set_exception(HostGone("the host process has ended"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()


_homes: dict[str, _Home] = {}
_changed = threading.Condition()


def _home(run: str) -> _Home:
    with _changed:
        if not _changed.wait_for(lambda: run in _homes, _APPEARS_WITHIN):
            raise HostGone("no host process was started")
        return _homes[run]


def _secede() -> None:
    """Leave Dask's slots to others: how much runs here at a time is the driver's business, and requests only wait."""
    from distributed import secede

    secede()


def stay(run: str) -> None:
    """Be this run's host until the task is cancelled or the Dask worker ends. Returns where the process ends before."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.get_current_task()
    _secede()
    home = _Home()
    with _changed:
        _homes[run] = home
        _changed.notify_all()
    try:
        while home.is_alive and worker.status.name in ("running", "paused"):
            state = worker.state.tasks.get(task)
            if state is None or state.state not in ("executing", "long-running"):
                break
            time.sleep(_LOOK_EVERY)
    finally:
        with _changed:
            if _homes.get(run) is home:
                del _homes[run]
        home.close()


def arrive(run: str, terms: Terms) -> Arrival:
    """Learn what this host has."""
    _secede()
    home = _home(run)
    held, folder = home.ask("arrive", terms, list(sys.path))
    home.folder = Path(folder)
    return Arrival(held, platform.node(), machine_id(), usable_cores())


def machine_id() -> str:
    """The same for all processes of a machine (or of a container, which is taken for one)."""
    address = uuid.getnode()
    made_up = address >> 40 & 1  # there is no network card to ask
    return platform.node() if made_up else f"{platform.node()} {address:x}"


def missing(run: str, names: list[str]) -> list[str]:
    """Which of these files are not below the run's folder."""
    _secede()
    folder = _home(run).folder
    return [name for name in names if not (folder / name).exists()]


def put(run: str, name: str, piece: bytes, *, first: bool, last: bool) -> None:
    """Add a piece to a file below the run's folder; it gets its name with the last one."""
    _secede()
    path = _home(run).folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}")  # others may bring the same to a cache
    with open(aside, "wb" if first else "ab") as file:
        file.write(piece)
    if last:
        os.replace(aside, path)


def fetch(run: str, name: str, start: int, length: int) -> bytes:
    """A piece of a file below the run's folder; empty behind its end."""
    _secede()
    with open(_home(run).folder / name, "rb") as file:
        file.seek(start)
        return file.read(length)


def begin(run: str, how: Begin) -> str:
    """Make the host ready for trials; returns the error as text, ``""`` where there is none."""
    _secede()
    return _home(run).ask("begin", how)


def run_trial(run: str, trial: Trial) -> Outcome:
    """Run one trial."""
    _secede()
    return _home(run).ask("trial", trial)


def prepare(run: str, workload: str, name: str) -> str:
    """Prepare a workload; returns the error as text, ``""`` where there is none."""
    _secede()
    return _home(run).ask("prepare", workload, name)


def cut(run: str) -> None:
    """End all trials that run; returns when their processes are gone."""
    _secede()
    _home(run).ask("cut")


def knock() -> None:
    """Nothing: a task by which a cluster that grows with its tasks learns that somebody waits for a worker."""
