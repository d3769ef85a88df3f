"""Prints the newest released Python on this machine that is newer than the running one, or nothing. For the Makefile."""

from __future__ import annotations

import sys

from cameraready.evidence.peers.interpreters import of_pyenv, on_path, probe


def main() -> None:
    paths = dict.fromkeys(path.resolve() for path in (*on_path(), *of_pyenv()))
    found = [interpreter for interpreter in map(probe, paths) if interpreter is not None]
    newest = max(found, key=lambda interpreter: _numbers(interpreter.version), default=None)
    if newest is not None and _numbers(newest.version)[:2] > sys.version_info[:2]:
        print(newest.path)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    main()
