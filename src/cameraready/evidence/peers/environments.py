"""Environments of peers: competitors that cannot share ours get a virtual environment of their own, built once.

An environment lies in the user's cache under a name made of everything that went into it. It is filled from the lock
beside the study, or else from the lock that the first build left in the cache: a rebuild gives the same versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cameraready.evidence.peers.interpreters import Interpreter, find_python
from cameraready.evidence.peers.remote import PeerError, PeerUnavailable, Remote
from cameraready.evidence.study import Peer

__all__ = ["PeerError", "PeerUnavailable", "Remote", "cache_folder", "ensure", "is_built", "lock_of", "open_peer"]

Progress = Callable[[str], None]
LOG_LINES = 15

# On Linux a build ends with the process that wanted it; the setting survives exec.
DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"

#: Where pip is told of something that uv must be told too. uv reads neither pip's variables nor its files.
PIP_TO_UV = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_NO_INDEX": "UV_NO_INDEX",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
}
#: What would lead an installer to another place than the environment.
MISLEADING = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT",
    "UV_SYSTEM_PYTHON", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT",
)  # fmt: skip


def cache_folder() -> Path:
    """Where environments lie: ``$CAMERAREADY_HOME/environments``, or in the user's cache folder."""
    home = os.environ.get("CAMERAREADY_HOME")
    if home:
        return Path(home).expanduser().absolute() / "environments"
    import platformdirs

    return platformdirs.user_cache_path("cameraready") / "environments"


def ensure(peer: Peer, folder: Path, *, progress: Progress | None = None) -> Path:
    """Build the environment of `peer` if it is not there yet, and return its interpreter.

    Safe against other processes that build the same environment: one builds, the others wait. A build that breaks off
    leaves nothing that would be taken for an environment.

    Parameters
    ----------
    peer : Peer
        The competitor.
    folder : Path
        The study's folder, where `peer.lock` lies and to which local requirements are relative.
    progress : callable, optional
        Given one sentence for each step.

    Raises
    ------
    PeerUnavailable
        No interpreter fits, or a package cannot be had; with the last lines of the installer.
    """
    target = place(peer, folder)
    if not works(target):
        tell = progress or (lambda sentence: None)
        target.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(target.with_name(target.name + ".guard"), peer, tell):
            if not works(target):
                Build(peer, folder, target, tell).run()
    return interpreter_in(target)


def is_built(peer: Peer, folder: Path) -> bool:
    """Whether `ensure` would return without building."""
    return works(place(peer, folder))


def lock_of(peer: Peer, folder: Path) -> str:
    """The exact versions in the environment of `peer`, one a line, for the keys of trials.

    The lock beside the study if the peer names one; otherwise the one that the first build left in the cache. Before
    the first build the bare requirements, so call `ensure` first where the text must last.
    """
    if peer.lock:
        return committed_lock(peer, folder)
    kept = place(peer, folder).with_suffix(".lock")
    return kept.read_text() if kept.exists() else "\n".join([peer.requirement, *peer.also]) + "\n"


def open_peer(peer: Peer, folder: Path, *, threads: int = 1, progress: Progress | None = None) -> Remote:
    """Start `peer` in its environment, which is built if needed. Close what is returned, or use it in a ``with``.

    Parameters
    ----------
    peer, folder, progress
        As for `ensure`.
    threads : int
        Threads that numerical libraries may use over there.

    Raises
    ------
    ValueError
        The peer has no script, or it is not there.
    PeerUnavailable
        The environment cannot be built or started.
    PeerError
        The script cannot be imported over there.
    """
    if not peer.script:
        raise ValueError(
            f"peer {peer.name} names no script, so nothing can be called; give it one: Peer(..., script='FILE.py')"
        )
    script = Path(folder, peer.script).absolute()
    if not script.is_file():
        raise ValueError(f"the script of peer {peer.name} is missing: {script}")
    return Remote(peer.name, ensure(peer, folder, progress=progress), script, threads=threads)


def place(peer: Peer, folder: Path) -> Path:
    parts = {
        "requirements": [peer.requirement, *peer.also],
        "python": peer.python or ".".join(map(str, sys.version_info[:3])),
        "installer": peer.installer,
        "dependencies": peer.dependencies,
        "lock": committed_lock(peer, folder) if peer.lock else "",
        "machine": [sys.platform, platform.machine()],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in peer.name)[:60]
    return cache_folder() / f"{name}-{digest}"


def committed_lock(peer: Peer, folder: Path) -> str:
    try:
        return Path(folder, peer.lock).read_text()
    except OSError as error:
        raise ValueError(f"peer {peer.name} names the lock {peer.lock}, which cannot be read: {error}") from None


def interpreter_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def works(environment: Path) -> bool:
    # A folder under its final name is complete, see Build.run. The interpreter that its link leads to may be gone.
    return interpreter_in(environment).exists()


@contextmanager
def one_at_a_time(guard: Path, peer: Peer, tell: Progress) -> Iterator[None]:
    """Hold an exclusive lock on the file `guard`; the system releases it when the process ends, however it ends."""
    with open(guard, "a+b") as file:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"waiting for another run that builds the environment of {peer.name}")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Build:
    """One construction of an environment, aside from its final place."""

    def __init__(self, peer: Peer, folder: Path, target: Path, tell: Progress) -> None:
        self.peer = peer
        self.folder = folder
        self.target = target
        self.tell = tell
        self.aside = target.with_name(f"{target.name}.building-{os.getpid()}")
        self.python = interpreter_in(self.aside)
        self.log = target.with_suffix(".log")
        self.kept_lock = target.with_suffix(".lock")

    def run(self) -> None:
        for leftover in self.target.parent.glob(f"{self.target.name}.building-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a build that was killed; we hold the guard
        self.log.unlink(missing_ok=True)
        try:
            lock = self.known_lock()
            minor = self.create(prefer=python_of(lock))
            if self.peer.installer == "pip":
                lock = self.fill_with_pip(lock, minor)
            else:
                lock = self.fill_with_uv(lock, minor)
            self.check()
            if not self.peer.lock:
                write_whole(self.kept_lock, lock)
            if self.target.exists():
                shutil.rmtree(self.target)  # it no longer worked
            os.rename(self.aside, self.target)
            self.log.unlink(missing_ok=True)
        finally:
            shutil.rmtree(self.aside, ignore_errors=True)

    def known_lock(self) -> str:
        if self.peer.lock:
            return committed_lock(self.peer, self.folder)
        return self.kept_lock.read_text() if self.kept_lock.exists() else ""

    def create(self, prefer: str) -> str:
        """Make the empty environment; returns the minor version of its interpreter."""
        wanted = self.peer.python
        found = find_python(wanted, prefer=prefer)
        self.tell(f"creating an environment for {self.peer.requirement} on Python {found.version if found else wanted}")
        if found is None:
            step = f"this machine has no Python {wanted} on PATH or in pyenv, and uv could not get one"
            self.step(step, [uv(), "venv", "--no-project", "--relocatable", "--python", wanted, str(self.aside)])
        elif self.peer.installer == "pip" and has_ensurepip(found):
            self.step(
                "its virtual environment could not be made", [str(found.path), "-I", "-m", "venv", str(self.aside)]
            )
            return found.minor
        else:
            self.step(
                "its virtual environment could not be made",
                [uv(), "venv", "--no-project", "--relocatable", "--python", str(found.path), str(self.aside)]
                + (["--seed"] if self.peer.installer == "pip" else []),
            )
            return found.minor
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        return self.step("its interpreter does not start", [str(self.python), "-I", "-c", asked]).strip()

    def fill_with_uv(self, lock: str, minor: str) -> str:
        alone = [] if self.peer.dependencies else ["--no-deps"]
        if not lock:
            self.tell(f"resolving {self.peer.requirement}")
            wanted = "\n".join([self.peer.requirement, *self.peer.also])
            compile_ = [
                uv(),
                "pip",
                "compile",
                "-",
                "--no-header",
                "--no-annotate",
                "--quiet",
                "--python",
                str(self.python),
            ]
            lock = f"# python {minor}\n" + self.step("no versions fit together", compile_ + alone, wanted)
        self.tell(f"installing {count(lock)} packages for {self.peer.name}")
        # The lock is complete, and must not be completed silently.
        install = [uv(), "pip", "install", "--no-deps", "--python", str(self.python), "-r", "-"]
        self.step("its packages could not be installed", install, lock)
        return lock

    def fill_with_pip(self, lock: str, minor: str) -> str:
        pip = [str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        if lock:
            self.tell(f"installing {count(lock)} packages for {self.peer.name} with pip")
            requirements = self.aside / "cameraready-lock.txt"
            requirements.write_text(lock)
            self.step("its packages could not be installed", [*pip, "install", "--no-deps", "-r", str(requirements)])
            return lock
        self.tell(f"installing {self.peer.requirement} with pip")
        alone = [] if self.peer.dependencies else ["--no-deps"]
        self.step(
            "its packages could not be installed", [*pip, "install", *alone, self.peer.requirement, *self.peer.also]
        )
        return f"# python {minor}\n" + self.step("pip could not list its packages", [*pip, "freeze"])

    def check(self) -> None:
        """The named distribution must be there: a lock may belong to something else."""
        if any(mark in self.peer.name for mark in "/\\"):
            return  # a local file; its name says nothing
        asked = f"from importlib.metadata import version; version({self.peer.name!r})"
        self.step(f"{self.peer.name} is not among the installed packages", [str(self.python), "-I", "-c", asked])

    def step(self, what: str, command: Sequence[str], text: str = "") -> str:
        """Run `command` with `text` as its input and return what it prints; its messages go to the log."""
        wrapped = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, *command] if sys.platform == "linux" else command
        with open(self.log, "a+") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            started = log.tell()
            ran = subprocess.run(
                wrapped,
                cwd=self.folder,
                env=installer_environment(),
                input=text,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            log.seek(started)
            messages = [line for line in (ran.stdout + log.read()).splitlines() if line.strip()]
            log.write(ran.stdout)
        if ran.returncode != 0:
            python = f", Python {self.peer.python}" if self.peer.python else ""
            raise PeerUnavailable(
                f"the environment of peer {self.peer.name} ({self.peer.requirement}{python}) cannot be built: {what}. "
                f"Package indexes are those of the UV_* and PIP_* variables; the full log is {self.log}\n"
                + "\n".join(messages[-LOG_LINES:])
            )
        return ran.stdout


def installer_environment() -> dict[str, str]:
    """The variables for uv and pip: ours, less those that lead elsewhere, and uv told of what pip was told."""
    variables = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    for theirs, name in PIP_TO_UV.items():
        value = os.environ.get(theirs)
        if value and name not in variables:
            # pip's lists are separated by blanks, uv's links by commas.
            variables[name] = ",".join(value.split()) if name == "UV_FIND_LINKS" else value
            if name == "UV_INDEX":
                # pip's meaning of several indexes: the best version of all of them.
                variables.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return variables


def uv() -> str:
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise PeerUnavailable(
            'environments of peers are built with uv, which is missing: pip install "cameraready[study]"'
        )
    return found


def has_ensurepip(interpreter: Interpreter) -> bool:
    # Debian ships interpreters whose venv module cannot make an environment with pip.
    return subprocess.run([interpreter.path, "-I", "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def python_of(lock: str) -> str:
    """The minor version that a kept lock was resolved for; empty if it does not say."""
    first = lock.partition("\n")[0]
    return first.removeprefix("# python ").strip() if first.startswith("# python ") else ""


def count(lock: str) -> int:
    return sum(1 for line in lock.splitlines() if line.strip() and line[0] not in "# -")


def write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    os.replace(aside, path)
