"""The packages under test: ``make dist-check`` builds them and says where they lie; without it these tests are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cameraready.evidence.peers.environments import PIP_TO_UV

ROOT = Path(__file__).parents[2]
DIST = "CAMERAREADY_DIST"


@pytest.fixture(scope="session")
def dist() -> Path:
    if DIST not in os.environ:
        pytest.skip(f"needs built packages: `make dist-check` builds them and sets {DIST}")
    return (ROOT / os.environ[DIST]).resolve()


@pytest.fixture(scope="session")
def wheel(dist) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def sdist(dist) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def away(tmp_path_factory) -> Path:
    """A working folder outside the repository."""
    return tmp_path_factory.mktemp("away")


@dataclass(frozen=True)
class Installation:
    """A virtual environment of its own, in which commands run away from the repository."""

    folder: Path
    away: Path

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, with nothing of this process's Python in sight."""
        program = self.folder / ("Scripts" if os.name == "nt" else "bin") / str(words[0])
        return run_away([program, *words[1:]], self.away)


def run_away(
    words: list[str | Path], away: Path, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    hidden = ("PYTHON", "VIRTUAL_ENV", "CAMERAREADY_", "PYTEST_", "COV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"HOME": str(away), "CAMERAREADY_HOME": str(away / "home"), "NO_COLOR": "1", **(more or {})}
    return subprocess.run(words, cwd=away, env=environment, capture_output=True, text=True)


def install(requirement: str, folder: Path, away: Path) -> Installation:
    """`requirement` in a new environment at `folder`, by pip as it is set up here, within the project's pins."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = Installation(folder, away)
    # pip finds its settings in the real home.
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", requirement],
        capture_output=True,
        text=True,
        cwd=away,
    )
    assert pip.returncode == 0, pip.stderr
    return made


def settings_for_uv() -> dict[str, str]:
    """What pip was told about indexes, in the words of uv, which reads neither pip's files nor its variables."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: the best version of all indexes
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name = PIP_TO_UV.get(f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}")
        if name:
            words = value.strip("'").split()
            found[name] = (",".join if name == "UV_FIND_LINKS" else " ".join)(words)
    return found
