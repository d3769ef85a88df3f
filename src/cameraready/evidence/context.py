"""What a trial is given beside its workload, and the one way to time arms against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The surroundings of one trial.

    Attributes
    ----------
    seed : int
        The trial's seed; equal for all arms of a block, so that they are paired.
    device, dtype : str
        What ``--device`` and ``--dtype`` asked for (``"cpu"`` and ``""`` by default).
    scratch : Path
        An empty folder, removed after the trial.
    deadline : float
        `time.monotonic()` by which the trial will be ended.
    prepared : mapping
        What the study's `prepare` returned for this workload, as arrays.
    own : mapping
        The user's own arms (``--with``), by name.
    without : frozenset
        Arms the user left out.
    is_own_workload : bool
        Whether the workload is the user's (``--on``).
    """

    seed: int
    device: str = "cpu"
    dtype: str = ""
    scratch: Path = Path()
    deadline: float = float("inf")
    prepared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    is_own_workload: bool = False
    open_peer: Callable[[str], Any] | None = None

    def peer(self, name: str) -> Any:
        """The running environment of peer `name`; its script's functions are methods of what is returned."""
        if self.open_peer is None:
            raise RuntimeError(f"peer {name!r} is not available in this process")
        return self.open_peer(name)

    def select(self, arms: Mapping[str, T]) -> dict[str, T]:
        """`arms` less those left out, plus the user's own. Trials resolve arm names through this alone."""
        return {name: arm for name, arm in {**arms, **self.own}.items() if name not in self.without}

    def rows(self, n: int) -> np.ndarray:
        """Indices of the table rows to use, shape (n,), for studies whose block is the seed.

        All rows in order on shipped workloads. On a user's own single table a bootstrap resample drawn by `seed`, so that
        an interval over seeds also covers the drawing of the rows.
        """
        if not self.is_own_workload:
            return np.arange(n)
        return np.random.default_rng([self.seed, 0x0B07]).integers(n, size=n)

    def time_left(self) -> float:
        """Seconds until the trial will be ended."""
        return self.deadline - time.monotonic()


def interleave(
    arms: Mapping[str, Callable[[], Any]], *, warmup: int = 1, repeats: int = 5, arm_column: str = "arm"
) -> list[dict[str, Any]]:
    """Time callables against each other in turn, so that drift of the machine hits all of them alike.

    The order rotates from round to round. Returns a row per arm and repeat: `arm_column`, ``repeat`` and ``seconds``
    (wall clock, `time.perf_counter`).
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    names = list(arms)
    for _ in range(warmup):
        for name in names:
            arms[name]()
    rows = []
    for repeat in range(repeats):
        turn = repeat % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            started = time.perf_counter()
            arms[name]()
            rows.append({arm_column: name, "repeat": repeat, "seconds": time.perf_counter() - started})
    return rows
