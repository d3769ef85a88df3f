"""Progress of long work on stderr: in a terminal, or where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(wanted: bool | None, total: int, name: str) -> Iterator[Callable[[int, str], None]]:
    """A function of the steps made so far and a remark; by default silent outside a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        yield lambda done, remark: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[remark]}"), console=console) as bar:
        task = bar.add_task(name, total=total, remark="")
        yield lambda done, remark: bar.update(task, completed=done, remark=remark)
