"""Memory of a worker: the limit of a trial, and its peak."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

#: Exit status of a worker whose trial went over its memory limit and could not be told so by a MemoryError.
MEMORY_EXIT = 77

_TICK = 0.05  # seconds between two looks at the worker's memory
_CHILDREN_EVERY = 20  # ticks between two looks at its children, which cost milliseconds
MIB = 2**20


class MemoryGuard:
    """Holds the trials of this process to a memory limit.

    Two fences: the kernel refuses allocations beyond the limit, so that the trial gets a `MemoryError` with a
    traceback; and a thread looks at the resident memory of the process and its children and ends the process with
    `MEMORY_EXIT`.
    """

    def __init__(self) -> None:
        self._ceiling = 0  # bytes of resident memory, children included; 0 while no trial runs
        self._seen = 0
        self._changed = threading.Lock()
        threading.Thread(target=self._watch, name="watch-memory", daemon=True).start()

    @contextlib.contextmanager
    def limit(self, gib: float) -> Iterator[None]:
        """Allow `gib` GiB beyond what the process holds now (no limit where `gib` is not positive)."""
        more = int(gib * 2**30)
        if more <= 0:
            yield
            return
        with self._changed:
            self._ceiling = _resident() + more
            self._seen = 0
        try:
            with _allocations_limited(more):
                yield
        finally:
            with self._changed:
                self._ceiling = 0

    @property
    def seen_mb(self) -> float:
        """The most that process and children together were seen to hold in the last trial, MiB (0: no children)."""
        return self._seen / MIB

    def _watch(self) -> None:
        tick = 0
        children = 0
        while True:
            time.sleep(_TICK)
            with self._changed:
                if not self._ceiling:
                    continue
                tick += 1
                if tick % _CHILDREN_EVERY == 0:
                    children = _children_resident()
                held = _resident() + children
                if children:
                    self._seen = max(self._seen, held)
                if held > self._ceiling:
                    allowed = f"allowed were {self._ceiling / MIB:.0f} MiB"
                    text = f"held {held / MIB:.0f} MiB, its children included; {allowed}\n"
                    os.write(2, text.encode())
                    os._exit(MEMORY_EXIT)


@contextlib.contextmanager
def _allocations_limited(more: int) -> Iterator[None]:
    if sys.platform != "linux":  # elsewhere the kernel takes such limits and does not hold to them
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    page = resource.getpagesize()
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * page
    soft = data + more if before[1] == resource.RLIM_INFINITY else min(data + more, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def start_peak() -> None:
    """Begin a new measurement of peak memory, where the system can (Linux); elsewhere the peak is the process's."""
    if sys.platform == "linux":
        # Some containers forbid it; then the peak is that of the process so far, never less than the trial's own.
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def peak_mb() -> float:
    """Peak resident memory of this process, MiB, since `start_peak`.

    On Linux from the high-water mark of the address space: `ru_maxrss` begins with the peak of the parent process.
    """
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    if os.name == "posix":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / MIB if sys.platform == "darwin" else peak / 1024
    import psutil

    return psutil.Process().memory_info().peak_wset / MIB


def _resident() -> int:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


def _children_resident() -> int:
    import psutil

    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total
