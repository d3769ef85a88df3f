"""Killed, interrupted and crowded runs: no finished trial is lost, the next run does the rest, no process stays."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.pool import run_trials, scratch_folder
from tests.evidence.driving import make_job, make_trials

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")

KILLS = 50
MORE_THAN_THE_WAITS = 5_000  # trials of two milliseconds, for one worker: the waits before the kills add up to 7.5 s
MORE_THAN_ENOUGH = 150_000  # trials of two milliseconds, for two workers: minutes, where the kills take seconds


class Nursery:
    """Starts drivers and listens to them."""

    def __init__(self, ledger: Path, log: Path, n: int, workers: int = 2) -> None:
        command = [sys.executable, "-m", "tests.evidence.driving", str(ledger), str(log), str(n), str(workers)]
        self.driver: psutil.Process | None = None
        environment = {**os.environ, "TMPDIR": str(ledger.parent)}  # killed drivers leave their folders there
        with open(ledger.parent / "errors", "w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)  # a driver must not wait for us to read
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self.process.stdout.close()
        self._lines.put("")

    def start(self) -> psutil.Process:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        word, pid = self.line().split()
        assert word == "pid"
        self.driver = psutil.Process(int(pid))
        return self.driver

    def line(self) -> str:
        line = self._lines.get(timeout=60)
        assert line, "the nursery ended"
        return line

    def hear_of_progress(self, said: list[str]) -> None:
        """Wait until the driver tells of one more trial that was done."""
        while not self._lines.empty():
            said.append(self.line())
        said.append(self.line())
        while not said[-1].endswith(" done"):
            said.append(self.line())

    def rest(self) -> list[str]:
        """All that the driver said up to its end."""
        return list(iter(self.line, "over"))

    def close(self) -> None:
        if self.driver is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.driver.kill()
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self._listener.join()


@pytest.fixture
def nursery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    made = Nursery(tmp_path / "ledger.sqlite", tmp_path / "log", *request.param)
    yield made
    made.close()


def kill_one(driver: psutil.Process, dice: random.Random) -> None:
    """Kill a worker, whichever; they come and go."""
    while True:
        assert is_alive(driver), "the run ended before the last kill, so this test shows nothing"
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            dice.choice(workers_of(driver)).kill()
            return
        time.sleep(0.01)


def workers_of(driver: psutil.Process) -> list[psutil.Process]:
    workers = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in driver.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ended meanwhile says nothing about the others
                if "spawn_main" in " ".join(child.cmdline()):
                    workers.append(child)
    return workers


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10.0
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [process for process in alive if is_alive(process)]
        time.sleep(0.01)
    assert alive == []


def is_alive(process: psutil.Process) -> bool:
    try:  # a zombie has ended; its new parent takes its time to notice
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def values(log: Path) -> Counter[int]:
    return Counter(int(line) for line in log.read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("nursery", [(MORE_THAN_THE_WAITS, 1)], indirect=True)
def test_killing_the_driver_at_any_moment_loses_nothing(nursery: Nursery, tmp_path: Path) -> None:
    dice = random.Random(1)
    told: set[str] = set()
    for kill in range(KILLS):
        driver = nursery.start()
        said = []
        if kill % 2:  # while trials are running; the others while the run is getting under way
            said.append(nursery.line())
        time.sleep(dice.uniform(0, 0.1 if kill % 2 else 0.5))
        assert is_alive(driver), "the run ended before the last kill, so this test shows nothing"
        family = driver.children(recursive=True)
        driver.kill()
        said += nursery.rest()
        told |= {line.split()[0] for line in said if line.endswith(" done")}
        assert_gone(family)

    trials = make_trials(tmp_path / "log", MORE_THAN_THE_WAITS)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.check()
        kept = ledger.finished(trial.key for trial in trials)
        assert told <= set(kept)
        assert all(outcome.status == "done" for outcome in kept.values())
        assert len(kept) > KILLS, "the kills hit no running trials, so this test shows nothing"
        summary = run_trials(trials, make_job(), ledger, 1, jobs=2)
        assert (summary.skipped, summary.done) == (len(kept), len(trials) - len(kept))
        found = ledger.finished(trial.key for trial in trials)
        assert [found[trial.key].rows for trial in trials] == [
            [{"value": number}] for number in range(MORE_THAN_THE_WAITS)
        ]
    ran = values(tmp_path / "log")
    assert set(ran) == set(range(MORE_THAN_THE_WAITS))
    # A trial runs twice only where the kill fell between its end and the commit: at most one a kill.
    assert sum(ran.values()) - MORE_THAN_THE_WAITS <= KILLS


@pytest.mark.slow
@pytest.mark.parametrize("nursery", [(MORE_THAN_ENOUGH, 2)], indirect=True)
def test_killing_workers_at_any_moment_hurts_only_their_trial(nursery: Nursery, tmp_path: Path) -> None:
    dice = random.Random(2)
    driver = nursery.start()
    family = set()
    said: list[str] = []
    for _ in range(KILLS):
        nursery.hear_of_progress(said)
        time.sleep(dice.uniform(0, 0.15))
        family |= set(driver.children(recursive=True))
        kill_one(driver, dice)
    nursery.hear_of_progress(said)
    os.killpg(driver.pid, signal.SIGINT)
    said += nursery.rest()
    assert_gone(list(family))
    assert said[-1].startswith("end ")
    assert said[-1].endswith(" True")

    told = dict(line.split() for line in said[:-1])
    states = Counter(told.values())
    assert set(states) <= {"done", "died"}
    assert states["died"] <= KILLS
    assert states["done"] > KILLS
    trials = [trial for trial in make_trials(tmp_path / "log", MORE_THAN_ENOUGH) if trial.key in told]
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert {key: outcome.status for key, outcome in ledger.outcomes(told).items()} == told
        assert ledger.count() == len(told)
        summary = run_trials(trials, make_job(), ledger, 1, jobs=2)
        assert (summary.skipped, summary.done, summary.failed) == (states["done"], states["died"], 0)
    ran = values(tmp_path / "log")
    assert sum(ran.values()) - len(ran) <= KILLS


@pytest.mark.parametrize("nursery", [(30_000, 2)], indirect=True)
@pytest.mark.parametrize("wait", [0.0, 0.1, 0.3, None])
def test_ctrl_c_ends_a_run_cleanly(nursery: Nursery, tmp_path: Path, wait: float | None) -> None:
    driver = nursery.start()
    said = [nursery.line()] if wait is None else []
    while not (family := driver.children(recursive=True)):  # the run has not begun yet
        time.sleep(0.01)
    time.sleep(wait or 0.05)
    family += driver.children(recursive=True)
    os.killpg(driver.pid, signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGINT)  # people press twice
    said += nursery.rest()
    assert_gone(family)
    _, done, failed, skipped, interrupted = said[-1].split()
    assert (failed, skipped, interrupted) == ("0", "0", "True")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.count() == int(done) == len(said) - 1
    assert (tmp_path / "errors").read_text() == ""  # nobody wants to see tracebacks then
    if wait is None:
        assert int(done) > 0


@pytest.mark.parametrize("nursery", [(0, 2)], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_of_trials_end_with_the_driver(nursery: Nursery, tmp_path: Path, number: int) -> None:
    driver = nursery.start()
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.02)
    family = driver.children(recursive=True)
    stubborn = int((tmp_path / "log").read_text().split()[1])
    assert stubborn in [process.pid for process in family]
    driver.send_signal(number)
    nursery.rest()
    assert_gone(family)


def test_two_drivers_at_once_share_a_ledger(tmp_path: Path) -> None:
    nurseries = [Nursery(tmp_path / "ledger.sqlite", tmp_path / f"log{number}", 400) for number in range(2)]
    for nursery in nurseries:
        nursery.start()
    ends = [nursery.rest()[-1].split() for nursery in nurseries]
    for nursery in nurseries:
        nursery.close()
    for word, done, failed, skipped, interrupted in ends:
        assert (word, failed, interrupted) == ("end", "0", "False")
        assert int(done) + int(skipped) == 400
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.check()
        found = ledger.finished(trial.key for trial in make_trials(tmp_path / "log0", 400))
        assert sorted(outcome.rows[0]["value"] for outcome in found.values()) == list(range(400))


SCRIPT = """
import sys
print("top of the script")
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.pool import scratch_folder, run_trials
from tests.evidence.test_pool import make_job, make_trials

class Mine:
    factor = 3
    def __call__(self, value):
        return self.factor * value

def helper(value):
    return Mine()(value) + 1

with Ledger.open(LEDGER) as ledger:
    trials = make_trials(*[{"does": "own", "value": value} for value in (5, 6, 7)])
    run_trials(trials, make_job(own={"mine": Mine(), "helper": helper}), ledger, 1, jobs=2)
    print([ledger.outcomes([trial.key])[trial.key].rows for trial in trials])
"""


@pytest.mark.parametrize("way", ["file", "stdin", "command", "module"])
def test_a_script_without_a_guard_runs_once_and_its_own_classes_work(tmp_path: Path, way: str) -> None:
    script = SCRIPT.replace("LEDGER", repr(str(tmp_path / "ledger.sqlite")))
    (tmp_path / "unguarded_script.py").write_text(script)
    command, text = {
        "file": ([str(tmp_path / "unguarded_script.py")], None),
        "stdin": (["-"], script),
        "command": (["-c", script], None),
        "module": (["-m", "unguarded_script"], None),
    }[way]
    path = os.pathsep.join([str(Path.cwd()), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stderr == ""
    rows = [[{"theirs": -value, "mine": 3 * value, "helper": 3 * value + 1}] for value in (5, 6, 7)]
    assert done.stdout.splitlines() == ["top of the script", str(rows)]


def testscratch_folders_of_killed_drivers_are_cleared_and_those_in_use_are_not() -> None:
    script = """
import os, signal, sys, tempfile
from cameraready.evidence.execution.pool import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    folder = Path(done.stdout.strip())
    assert done.returncode == -signal.SIGKILL
    assert folder.name.startswith("cameraready-run-")
    with scratch_folder() as held:
        for each in (folder, held):
            os.utime(each, (0, 0))
        with scratch_folder() as young, scratch_folder():
            assert not folder.exists()
            assert held.exists()
            assert young.exists()
    assert not held.exists()
