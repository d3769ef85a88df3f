"""How far a run is: a live bar on a terminal, a plain line now and then elsewhere; always on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from cameraready.evidence.outcomes import Outcome, Trial

#: Seconds between two lines where there is no terminal.
LINE_EVERY = 10.0


@contextlib.contextmanager
def progress(
    total: int, limit_seconds: float | None = None, *, stream: TextIO | None = None
) -> Iterator[Callable[[Trial, Outcome], None]]:
    """Show the progress of `total` trials while the context lasts; no estimate of the time left exceeds the run's limit.

    Yields
    ------
    callable
        ``tell(trial, outcome)``, to be called for each trial that ended; what `run_trials` takes as `on_outcome`.
    """
    stream = stream or sys.stderr
    if total == 0:
        yield lambda trial, outcome: None
    elif stream.isatty():
        with _bar(total, limit_seconds, stream) as tell:
            yield tell
    else:
        yield _Lines(total, limit_seconds, stream)


@contextlib.contextmanager
def _bar(total: int, limit: float | None, stream: TextIO) -> Iterator[Callable[[Trial, Outcome], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Left(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            left = time_left(int(task.completed), total, task.elapsed or 0.0, task.time_remaining, limit)
            return Text("" if left is None else f"about {duration(left)} left")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Left(),
    )
    failed = 0
    # A speed over the last minutes follows trials that get longer; transient: the answer is to be the first thing on
    # the screen.
    with Progress(*columns, console=Console(file=stream), speed_estimate_period=120.0, transient=True) as bar:
        task = bar.add_task("trials", total=total)

        def tell(trial: Trial, outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.status != "done"
            bar.update(task, advance=1, description=f"trials, {failed} failed" if failed else "trials")

        yield tell


class _Lines:
    def __init__(self, total: int, limit: float | None, stream: TextIO) -> None:
        self._total = total
        self._limit = limit
        self._stream = stream
        self._ended = 0
        self._failed = 0
        self._began = self._spoke = time.monotonic()

    def __call__(self, trial: Trial, outcome: Outcome) -> None:
        self._ended += 1
        self._failed += outcome.status != "done"
        now = time.monotonic()
        if now - self._spoke >= LINE_EVERY:
            self._spoke = now
            elapsed = now - self._began
            at_this_pace = elapsed / self._ended * (self._total - self._ended)
            left = time_left(self._ended, self._total, elapsed, at_this_pace, self._limit)
            print(progress_line(self._ended, self._total, self._failed, left), file=self._stream, flush=True)


def time_left(ended: int, total: int, elapsed: float, left: float | None, limit: float | None) -> float | None:
    """The estimate `left` in seconds, within the run's limit; None while 10 trials, or 5 % of them, have not ended."""
    if left is None or ended < min(10, 0.05 * total):
        return None
    return left if limit is None else min(left, max(limit - elapsed, 0.0))


def progress_line(ended: int, total: int, failed: int, left: float | None) -> str:
    """One line that says how far a run is; `left` in seconds, None where it cannot be told yet."""
    failures = f", {failed} failed" if failed else ""
    about = "" if left is None else f", about {duration(left)} left"
    return f"{ended} of {total} trials{failures}{about}"


def duration(seconds: float) -> str:
    """A time span as people say it: ``"42 s"``, ``"5 min"``, ``"3 h 20 min"``."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
