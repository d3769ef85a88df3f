"""Threads of the linear-algebra libraries: one for small blocks, where more only wait for each other, all for large ones."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any

from threadpoolctl import ThreadpoolController

# Fronts from this size on are worth dividing among threads.
LARGE_FRONT = 1500


class BlasThreads:
    """A context in which BLAS uses one thread until `for_front` says that a large block comes; restores what was."""

    def __init__(self) -> None:
        self._libraries = _libraries()

    def __enter__(self) -> BlasThreads:
        self._before = [library.num_threads for library in self._libraries]
        self._many = max(self._before, default=1) > 1
        self._large = True
        self.for_front(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.for_front(LARGE_FRONT)

    def for_front(self, size: int) -> None:
        """Set the threads for a block of `size` rows."""
        large = size >= LARGE_FRONT
        if large == self._large or not self._many:
            return
        self._large = large
        for library, before in zip(self._libraries, self._before, strict=True):
            library.set_num_threads(before if large else 1)


@cache
def _libraries() -> list[Any]:
    return ThreadpoolController().select(user_api="blas").lib_controllers
