"""Runs on a cluster give what local runs give, whatever dies, is cut off or comes back meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.evidence.cluster.machines import ROOT, Machine, Network, namespaces_allowed, wait_until
from tests.evidence.studies.roaming import WHERE_AND_WHEN

ISOLATION = "namespaces" if sys.platform == "linux" and namespaces_allowed() else "plain-processes"
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="needs signals and process groups"),
    pytest.mark.xdist_group("cluster"),
    pytest.mark.slow,
]
MEASURED = (*WHERE_AND_WHEN, "trial_seconds", "trial_peak_mb")


class Nursery:
    """Starts drivers on the hub and listens to them."""

    def __init__(self, hub: Machine) -> None:
        self.hub = hub
        self.process = hub.start(
            [sys.executable, "-m", "tests.evidence.cluster.driving"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.driver: psutil.Process | None = None
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._messages.put(json.loads(line))

    def start(self, ledger: Path, **call: Any) -> None:
        self.send({"ledger": str(ledger), **call})

    def send(self, call: dict[str, Any]) -> None:
        line = json.dumps(call)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.driver = psutil.Process(self._messages.get(timeout=60)["pid"])

    def end(self) -> dict[str, Any]:
        """What the driver found; empty where it was killed."""
        found = self._messages.get(timeout=90)
        if "over" in found:
            return {}
        assert self._messages.get(timeout=60) == {"over": True}
        return found

    def run(self, ledger: Path, **call: Any) -> dict[str, Any]:
        self.start(ledger, **call)
        return self.end()

    def shipped(self, scheduler: str) -> int:
        """Pieces of jobs and files that went over the scheduler so far."""
        self.send({"shipped": scheduler})
        return self.end()["shipped"]

    def said(self) -> str:
        return (self.hub.folder / "log").read_text()


class Cluster:
    """A scheduler and two workers, and who runs trials on them."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(folder)
        self.alpha = self.network.add("alpha")
        self.beta = self.network.add("beta")
        self.network.start_scheduler()
        self.nursery = Nursery(self.network.hub)

    def run(self, ledger: Path, **call: Any) -> dict[str, Any]:
        return self.nursery.run(ledger, scheduler=self.network.url, **call)

    def start(self, ledger: Path, **call: Any) -> None:
        self.nursery.start(ledger, scheduler=self.network.url, **call)

    def trial_processes(self) -> list[psutil.Process]:
        """Host processes and all below them, on both workers' machines."""
        found = []
        for machine in (self.alpha, self.beta):
            for process in machine.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "cluster.host" in " ".join(process.cmdline()):
                        found += [process, *process.children(recursive=True)]
        return found

    def wait_for_trials(self, ledger: Path, n: int) -> None:
        """Until the ledger holds `n` trials."""
        wait_until(lambda: count(ledger) >= n, 60)


@pytest.fixture(scope="module", params=[ISOLATION])
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        made.network.close()


@pytest.fixture
def cluster(machines: Cluster) -> Cluster:
    """With both workers, whatever the test before did."""
    for machine in (machines.alpha, machines.beta):
        if not machine.processes():
            machines.network.start_worker(machine)
    return machines


@pytest.fixture(scope="module")
def local(machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run without the cluster."""
    return values(machines.nursery.run(tmp_path_factory.mktemp("local") / "ledger"))


def values(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, sorted, less what is measured."""
    assert "error" not in found, found["trace"]
    rows = [{name: value for name, value in row.items() if name not in MEASURED} for row in found["rows"]]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def shares(found: dict[str, Any]) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"(\S+) \((\d+) trials\)", found["hosts"])}


def count(ledger: Path) -> int:
    from cameraready.evidence.execution.ledger import Ledger

    if not ledger.exists():
        return 0
    with Ledger.open(ledger) as store:
        return store.count()


def gone(processes: list[psutil.Process]) -> bool:
    def is_gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(is_gone, processes))


def test_the_rows_are_those_of_a_local_run(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    found = cluster.run(tmp_path / "ledger")
    assert values(found) == local
    assert len(local) == 60
    assert sum(shares(found).values()) == 60
    # The ledger is the driver's, keys are the same: a local run finds nothing to do.
    again = cluster.nursery.run(tmp_path / "ledger")
    assert again["rows"] == found["rows"]


def test_own_data_and_arms_are_sent_once(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y\n" + "".join(f"{i},{i % 7}\n" for i in range(40)))
    call = {"on": f"{tmp_path}/data.csv:y", "set": {"pause": 0.001}}
    before = cluster.nursery.shipped(cluster.network.url)
    remote = cluster.run(tmp_path / "remote", own_arm=str(tmp_path / "unpacked"), **call)
    sent = cluster.nursery.shipped(cluster.network.url) - before
    near = cluster.nursery.run(tmp_path / "near", own_arm=str(tmp_path / "other"), **call)
    assert less_keys(values(remote)) == less_keys(values(near))
    assert len(remote["rows"]) == 90
    # To each host: the table, the job (a megabyte of it the arm's), and to those that have not prepared it the arrays.
    hosts = len(shares(remote))
    assert 2 * hosts <= sent <= 3 * hosts
    pids = (tmp_path / "unpacked").read_text().split()
    assert len(set(pids)) == len(pids), "a worker process unpacked the job twice"


def test_objects_and_time_limits(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.run(tmp_path / "ledger", on_values=[1.0, 2.0, 4.0], minutes=0.1, set={"pause": 0.4}, by_client=True)
    assert first["incomplete"]
    assert not first["interrupted"]
    assert 0 < len(first["rows"]) < 60
    wait_until(lambda: not cluster.trial_processes())


def test_blocks_that_run_alone_stay_on_one_host(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.run(tmp_path / "ledger", set={"alone": True, "number": [1, 2, 3, 4]}, jobs=2)
    rows = found["rows"]
    assert len(rows) == 8
    assert len({row["pid"] for row in rows}) == 8  # a fresh process each
    of_block, of_host = defaultdict(set), defaultdict(list)
    for row in rows:
        of_block[row["number"]].add(row["host"])
        of_host[row["host"]].append((row["began"], row["ended"]))
    if ISOLATION == "namespaces":
        assert set(of_host) == {"alpha", "beta"}
    assert all(len(hosts) == 1 for hosts in of_block.values())
    for spans in of_host.values():
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_an_interrupt_and_a_kill_leave_no_process(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    for end in (signal.SIGINT, signal.SIGKILL):
        ledger = tmp_path / str(end)
        cluster.start(ledger, set={"pause": 0.3})
        cluster.wait_for_trials(ledger, 3)
        family = cluster.trial_processes()
        assert family
        cluster.nursery.driver.send_signal(end)
        found = cluster.nursery.end()
        assert found.get("interrupted", end == signal.SIGKILL)
        wait_until(lambda family=family: gone(family))
        assert cluster.trial_processes() == []
        kept = count(ledger)
        assert 3 <= kept < 60


def test_a_trial_that_kills_its_host_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.run(tmp_path / "ledger", set={"does": "kill its host"})
    assert Counter(row["status"] for row in found["rows"]) == {"done": 59, "died": 1}
    assert len(found["failures"]) == 1
    assert "3 hosts were lost while this trial was there" in found["failures"][0]


def test_a_worker_killed_during_the_run(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    cluster.start(tmp_path / "ledger", set={"pause": 0.1})
    cluster.wait_for_trials(tmp_path / "ledger", 5)
    cluster.alpha.kill()
    found = cluster.nursery.end()
    assert less_keys(values(found)) == less_keys(local)
    assert not found["failures"]


def test_a_worker_cut_off_and_back(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    cluster.start(tmp_path / "ledger", set={"pause": 0.25})
    cluster.wait_for_trials(tmp_path / "ledger", 10)
    cluster.beta.cut_off()
    try:
        time.sleep(5.5)  # longer than the scheduler waits for it
    finally:
        cluster.beta.bring_back()
    found = cluster.nursery.end()
    assert less_keys(values(found)) == less_keys(local)
    assert not found["failures"]


def test_the_scheduler_restarted(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    cluster.start(tmp_path / "ledger", set={"pause": 0.1})
    cluster.wait_for_trials(tmp_path / "ledger", 5)
    cluster.network.seat.kill()
    kept = count(tmp_path / "ledger")
    assert kept < 60
    wait_until(lambda: "trying to reach it again" in cluster.nursery.said())
    cluster.network.start_scheduler()
    found = cluster.nursery.end()
    assert less_keys(values(found)) == less_keys(local)
    assert not found["failures"]
    assert "reached the scheduler" in cluster.nursery.said()


def test_without_hosts_a_run_ends_and_goes_on_elsewhere(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    cluster.start(tmp_path / "ledger", set={"pause": 0.1}, wait=4)
    cluster.wait_for_trials(tmp_path / "ledger", 5)
    for machine in (cluster.alpha, cluster.beta):
        machine.kill()
    found = cluster.nursery.end()
    assert found["interrupted"]
    assert 5 <= len(found["rows"]) < 60
    assert any("there was no host" in note for note in found["notes"])
    rest = cluster.nursery.run(tmp_path / "ledger", set={"pause": 0.1})
    assert less_keys(values(rest)) == less_keys(local)
    assert [row for row in rest["rows"] if row["pid"] in {r["pid"] for r in found["rows"]}] == found["rows"]


def test_a_host_with_another_version_is_left_out(cluster: Cluster, local: Any, tmp_path: Path) -> None:
    for machine in (cluster.alpha, cluster.beta):
        machine.kill()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "tests", other / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    study = other / "tests/evidence/studies/roaming.py"
    study.write_text(study.read_text().replace("SCALE = 1.0", "SCALE = 1.5"))
    cluster.network.start_worker(cluster.alpha, cwd=other)
    refused = cluster.run(tmp_path / "ledger")
    assert re.search("UsageError.* no host of the cluster can take part: .*the code of .*roaming", refused["error"])
    log = cluster.beta.folder / "log"
    log.unlink()
    cluster.network.start_worker(cluster.beta)
    wait_until(lambda: "Registered" in log.read_text())
    found = cluster.run(tmp_path / "ledger")
    assert values(found) == local
    assert any("roaming:STUDY is another there" in note for note in found["notes"])
    cluster.alpha.kill()


def less_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("pause", "trial")} for row in rows]
