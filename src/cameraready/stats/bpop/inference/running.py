"""Chains on threads, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def mapper(n_jobs: int) -> Iterator[Any]:
    """Calls a function on each of some values, on `n_jobs` threads."""
    if n_jobs == 1:
        yield lambda function, values: [function(value) for value in values]
        return
    with ThreadPoolExecutor(n_jobs) as pool:
        yield lambda function, values: list(pool.map(function, values))


@contextmanager
def progress_bar(wanted: bool | None, total: int) -> Iterator[Any]:
    """Takes the number of steps done since the last call; draws a bar where that is wanted, or on a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("sampling orders", total=total)
        yield lambda steps: bar.advance(task, steps)
