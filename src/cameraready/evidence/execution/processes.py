"""How worker processes begin and end: without the user's script, in a group of their own, never orphaned."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

#: Variables by which numerical libraries are told how many threads to use; read once, when they load.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
)

_launching = threading.Lock()

#: The undertaker: a bare Python that reads "+pid" and "-pid" lines and, when its input ends because the driver is gone,
#: kills the process groups that are left. It is what ends a trial's own child processes when the driver is killed with
#: SIGKILL.
_UNDERTAKER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
"""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()[:2]
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


class Undertaker:
    """Knows the living worker processes of a run, and sees to it that they do not outlive the driver."""

    def __init__(self) -> None:
        self._telling = threading.Lock()  # workers are buried by several threads at once
        self._process: subprocess.Popen[str] | None = None
        if os.name == "posix":
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _UNDERTAKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
            )

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}")

    def bury(self, pid: int) -> None:
        """End a worker's whole process group at once, or the worker alone where it was only just born and leads none yet."""
        kill_group(pid)
        _kill_newborn(pid)
        self._tell(f"-{pid}")

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # it may have been killed by hand
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process is not None:
            with self._telling, contextlib.suppress(OSError):
                print(line, file=self._process.stdin, flush=True)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a worker and to all that it started."""
    if os.name != "posix":
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # A worker that was only just born is not yet the leader of a group; then it has no children either.
        os.killpg(pid, signal.SIGKILL)


def _kill_newborn(pid: int) -> None:
    """Send SIGKILL to a child of this process; left to itself it would find its pool gone and end with a traceback."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.ppid() == os.getpid():  # else the worker is gone and its number may be somebody else's
            process.kill()


class WorkerContext(multiprocessing.context.SpawnContext):
    """A spawn context whose processes do not run the user's script again.

    `multiprocessing` imports ``__main__`` in every child, so a script without ``if __name__ == "__main__"`` would start
    itself anew and one read from standard input would not start at all. Workers need nothing from it: what the user
    hands over is pickled by value.
    """

    def __init__(self, threads: int, on_birth: Callable[[int], None]) -> None:
        super().__init__()
        self._threads = threads
        self._on_birth = on_birth

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override]
        process = _WorkerProcess(*args, **kwargs)
        process.threads, process.on_birth = self._threads, self._on_birth
        return process


class _WorkerProcess(multiprocessing.context.SpawnProcess):
    threads = 1
    on_birth: Callable[[int], None] | None = None

    def start(self) -> None:
        on_birth, self.on_birth = self.on_birth, None  # stays here; the rest of the object is sent to the child
        with _launching, _environment(thread_environment(self.threads)), _without_main(), _interrupts_blocked():
            super().start()
        if on_birth is not None:
            on_birth(self.pid)  # type: ignore[arg-type]


def thread_environment(threads: int) -> dict[str, str]:
    """The variables that hold numerical libraries to `threads` threads."""
    return {name: str(threads) for name in THREAD_VARIABLES} | {"TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, if it is not running, so that it works in silence.

    It removes the semaphores that killed workers leave behind, which is its job and no news to the user.
    """
    with _environment({"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}):
        multiprocessing.resource_tracker.ensure_running()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A worker is born deaf to Ctrl-C: until it has left the terminal's process group it would die of it, with a traceback."""
    if os.name != "posix":
        yield
        return
    start_resource_tracker()  # it would lift the block if it were started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """While this thread launches a worker, `multiprocessing` does not tell the worker where ``__main__`` is."""
    original = multiprocessing.spawn.get_preparation_data
    launcher = threading.get_ident()

    def preparation(name: str) -> dict[str, Any]:
        data = original(name)
        if threading.get_ident() == launcher:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = preparation
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original


def live_in_own_group() -> None:
    """Called in a worker: leave the driver's process group and terminal, and die with the driver."""
    if os.name == "posix":
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.process.parent_process()
    if sys.platform == "linux":
        _die_with_parent()
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the driver died before the kernel was told
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), name="watch-driver", daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()  # returns when the driver is gone, however it went
    kill_group(os.getpid())


def _die_with_parent() -> None:
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refused to end this worker together with the driver")
