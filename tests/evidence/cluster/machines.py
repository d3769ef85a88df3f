"""Machines for the tests: network namespaces joined by a bridge where they may be made, plain processes elsewhere.

A namespace lives as long as the process that holds it, and that dies with the tests however these end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
MARK = "CAMERAREADY_TEST_MACHINE"

#: Short patience, so that what is cut off is noticed within a test. All of it is configuration that any cluster may have.
PATIENCE = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "3s",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "4s",
}


def die_with_parent() -> None:
    """To be called in a child: what the tests started must not outlive them, even if they are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def wait_until(what: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.05)


class Machine:
    """A place where commands run: in namespaces of its own, or beside all others."""

    def __init__(self, name: str, folder: Path, *, isolated: bool) -> None:
        self.name = name
        self.mark = f"{name}-{uuid.uuid4().hex[:8]}"
        self.folder = folder / name
        self.folder.mkdir()
        self.address = "127.0.0.1"
        self._holder: subprocess.Popen[bytes] | None = None
        self._stopped: list[psutil.Process] = []
        if isolated:
            hold = ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo ready && exec sleep 100000"]
            self._holder = subprocess.Popen(hold, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
            assert self._holder.stdout.readline() == b"ready\n"
            self.shell("ip link set lo up")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def within(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-u", *command] if self._holder else list(command)

    def shell(self, text: str) -> None:
        subprocess.run(self.within(["sh", "-c", text]), check=True, capture_output=True)

    def start(self, command: Sequence[str], cwd: Path = ROOT, **options: object) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **PATIENCE,
            MARK: self.mark,
            "CAMERAREADY_HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder),
        }
        environment.pop("PYTHONPATH", None)
        options = {"stdout": subprocess.DEVNULL, **options}
        options["preexec_fn"] = die_with_parent
        with open(self.folder / "log", "a") as log:
            return subprocess.Popen(self.within(command), env=environment, cwd=cwd, text=True, stderr=log, **options)

    def processes(self) -> set[psutil.Process]:
        """All that runs here and was started by a test."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process)
        return found

    def kill(self) -> None:
        """Everything at once."""
        while alive := self.processes():
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def cut_off(self) -> None:
        if self._holder:
            self.shell("ip link set eth0 down")
        else:
            self._stopped = list(self.processes())
            for process in self._stopped:
                process.suspend()

    def bring_back(self) -> None:
        if self._holder:
            self.shell("ip link set eth0 up")
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        self.kill()
        if self._holder:
            self._holder.stdout.close()
            self._holder.kill()
            self._holder.wait()


class Network:
    """A hub, where drivers run, a scheduler's machine, and workers' machines."""

    def __init__(self, folder: Path) -> None:
        self.isolated = namespaces_allowed()
        self.folder = folder
        self.machines: list[Machine] = []
        self.hub = self.add("hub")
        if self.isolated:
            self.hub.shell(
                "ip link add bridge type bridge && ip addr add 10.99.0.1/24 dev bridge && ip link set bridge up"
            )
            self.hub.address = "10.99.0.1"
        self.seat = self.add("scheduler")
        self.port = 8786 if self.isolated else free_port()

    @property
    def url(self) -> str:
        return f"tcp://{self.seat.address}:{self.port}"

    def add(self, name: str) -> Machine:
        machine = Machine(name, self.folder, isolated=self.isolated)
        if self.isolated and self.machines:
            number = len(self.machines) + 1
            machine.address = f"10.99.0.{number}"
            self.hub.shell(f"ip link add port{number} type veth peer name eth0 netns {machine.pid}")
            self.hub.shell(f"ip link set port{number} master bridge && ip link set port{number} up")
            machine.shell(f"ip addr add {machine.address}/24 dev eth0 && ip link set eth0 up")
        self.machines.append(machine)
        return machine

    def start_scheduler(self) -> None:
        host = self.seat.address
        command = [
            sys.executable,
            "-m",
            "dask",
            "scheduler",
            "--no-dashboard",
            "--host",
            host,
            "--port",
            str(self.port),
        ]
        self.seat.start(command)

    def start_worker(self, machine: Machine, cwd: Path = ROOT) -> None:
        """A Dask worker with a nanny, under a supervisor that starts it again whenever it ends."""
        worker = [sys.executable, "-m", "dask", "worker", self.url, "--nthreads", "1", "--no-dashboard"]
        worker += ["--local-directory", str(machine.folder), "--name", machine.name]
        machine.start(["sh", "-c", 'while :; do "$@"; sleep 0.2; done', "sh", *worker], cwd)

    def close(self) -> None:
        for machine in reversed(self.machines):
            machine.close()


def namespaces_allowed() -> bool:
    """Whether this user may make network namespaces and connect them."""
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    attempt = "ip link add probe type veth peer name eborp && ip link add brobe type bridge && hostname probe"
    return subprocess.run(["unshare", "--net", "--uts", "sh", "-c", attempt], capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
