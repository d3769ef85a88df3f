"""A crew loses no task where a worker is gone before it got one, and its undertaker understands all that it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cameraready.evidence.execution.crew import Crew, Ending, Stop, Task
from cameraready.evidence.execution.processes import Undertaker


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_an_undertaker_understands_many_voices_at_once() -> None:
    """It ends with an error where two lines run into each other, and would then end nobody."""
    undertaker = Undertaker()
    process = undertaker._process
    assert process is not None

    def tell(first: int) -> None:
        for pid in range(first, first + 400):  # beyond what any kernel gives out
            undertaker.watch(pid)
            undertaker.bury(pid)

    threads = [threading.Thread(target=tell, args=(2**26 + 1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    undertaker.close()
    assert process.returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_a_worker_that_leads_no_group_yet_is_ended_and_a_stranger_is_not() -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    parent = f"import subprocess; p = subprocess.Popen({sleeps!r}); print(p.pid, flush=True); p.wait()"
    undertaker = Undertaker()
    newborn = subprocess.Popen(sleeps)
    other = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    stranger = psutil.Process(int(other.stdout.readline()))  # no child of ours
    try:
        undertaker.bury(newborn.pid)
        undertaker.bury(stranger.pid)
        assert newborn.wait(timeout=10) == -signal.SIGKILL
        assert stranger.is_running()
    finally:
        undertaker.close()
        stranger.kill()
        other.wait(timeout=10)
        other.stdout.close()


def test_a_task_whose_worker_was_gone_before_it_began_is_done_by_the_next_worker(tmp_path: Path) -> None:
    crew = Crew(b"", tmp_path, threads=1, open_timeout=60.0)
    ended: list[tuple[int, Ending]] = []

    def on_end(task: Task, ending: Ending) -> None:
        ended.append((task.subject, ending))
        if len(ended) == 1:
            crew._workers[0]._pool.stop()  # type: ignore[union-attr]

    tasks = [Task(number, abs, (-number,), 60.0) for number in range(1, 5)]
    try:
        crew.work(tasks, 1, on_end, Stop())
    finally:
        crew.close()
    assert [(number, ending.kind, ending.value) for number, ending in ended] == [
        (number, "returned", number) for number in range(1, 5)
    ]
