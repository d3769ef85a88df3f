"""Finds an interpreter of a wanted version on this machine: our own, those on PATH, those of pyenv."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROBE = (
    "import json, sys, sysconfig; print(json.dumps(['.'.join(map(str, sys.version_info[:3])), sys.version_info[3], "
    "sys.implementation.name, bool(sysconfig.get_config_var('Py_GIL_DISABLED')), "
    "getattr(sys, '_base_executable', None) or sys.executable]))"
)
PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class Interpreter:
    path: Path
    version: str  # "3.12.1"

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def find_python(specifier: str, *, prefer: str = "") -> Interpreter | None:
    """The interpreter to build a peer's environment from, or None if this machine has none that fits.

    Our own is taken where it fits, so that both sides of a comparison run on the same interpreter. Otherwise the oldest
    fitting minor version on PATH, then of pyenv: the one for which most packages have wheels.

    Parameters
    ----------
    specifier : str
        A PEP 440 version specifier, such as ``">=3.12"`` or ``"==3.12.*"``; empty means our own version.
    prefer : str
        A minor version (``"3.12"``) to take before all others, because packages were resolved for it.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    own = probe(Path(sys.executable))
    if not specifier and own is not None:
        return own
    try:
        accepted = SpecifierSet(specifier)
    except InvalidSpecifier:
        raise ValueError(f'{specifier!r} is not a version specifier of Python; write for example ">=3.12"') from None

    def fitting(candidates: Iterable[Path]) -> list[Interpreter]:
        seen: set[Path] = set()
        found = []
        for candidate in candidates:
            interpreter = probe(candidate)
            if interpreter is None or interpreter.path in seen:
                continue
            seen.add(interpreter.path)
            if accepted.contains(interpreter.version):
                found.append(interpreter)
        return sorted(found, key=order)

    def order(interpreter: Interpreter) -> tuple[bool, int, int]:
        _, minor, patch = map(int, interpreter.version.split("."))
        return (interpreter.minor != prefer, minor, -patch)

    groups = [[own] if own is not None and accepted.contains(own.version) else []]
    for place in (on_path, of_pyenv):
        if groups[-1] and (not prefer or groups[-1][0].minor == prefer):
            break
        groups.append(fitting(place()))
    everything = [interpreter for group in groups for interpreter in group]
    preferred = [interpreter for interpreter in everything if interpreter.minor == prefer]
    return next(iter(preferred + everything), None)


def on_path() -> Iterator[Path]:
    """Interpreters in the folders of PATH, in its order. pyenv's shims are among them, also those that do not run."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        try:
            names = sorted(os.listdir(folder or os.curdir))
        except OSError:
            continue  # PATH often names folders that do not exist
        for name in names:
            if re.fullmatch(r"python(3(\.\d+)?)?(\.exe)?", name):
                yield Path(folder or os.curdir, name)


def of_pyenv() -> Iterator[Path]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob("versions/*/bin/python"))
    yield from sorted(root.glob("pyenv-win/versions/*/python.exe"))


def probe(candidate: Path) -> Interpreter | None:
    """Run `candidate` and ask what it is. None for what does not run, PyPy, pre-releases and builds without a GIL."""
    try:
        answer = subprocess.run(
            [candidate, "-I", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        if answer.returncode != 0:
            return None
        version, level, implementation, free_threaded, path = json.loads(answer.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    if implementation != "cpython" or level != "final" or free_threaded:
        return None
    return Interpreter(Path(path), version)
