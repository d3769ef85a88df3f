"""Finding interpreters: our own first, then PATH, then pyenv, and nothing that does not run."""

import os
import sys
from pathlib import Path

import pytest

from cameraready.evidence.peers.interpreters import find_python, probe

pytestmark = pytest.mark.skipif(os.name == "nt", reason="stand-ins for interpreters are shell scripts")

OURS = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nothing on PATH or in pyenv; returns a function that adds interpreters."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'not-there'}{os.pathsep}{tmp_path / 'bin'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    def add(place, version, *, level="final", implementation="cpython", free_threaded="false"):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        answer = f'["{version}", "{level}", "{implementation}", {free_threaded}, "{file}"]'
        file.write_text(f"#!/bin/sh\necho '{answer}'\n")
        file.chmod(0o755)
        return file

    add.folder = tmp_path
    return add


def test_our_own_where_it_fits():
    for specifier in ("", ">=3.11", f"=={OURS}"):
        found = find_python(specifier)
        assert found.version == OURS
        assert found.path.samefile(getattr(sys, "_base_executable", sys.executable))


def test_none_where_nothing_fits(machine):
    assert find_python(">=3.99") is None


def test_path_comes_before_pyenv(machine):
    machine("pyenv/versions/3.98.5/bin/python", "3.98.5")
    on_path = machine("bin/python3.99", "3.99.1")
    assert find_python(">=3.98").path == on_path
    assert find_python("==3.98.*").version == "3.98.5"


def test_oldest_minor_version_and_its_newest_patch(machine):
    for version in ("3.99.0", "3.98.2", "3.98.11", "3.97.4"):
        machine(f"pyenv/versions/{version}/bin/python", version)
    assert find_python(">=3.98").version == "3.98.11"
    assert find_python(">=3.98", prefer="3.99").version == "3.99.0"
    assert find_python(">=3.98", prefer="3.55").version == "3.98.11"


def test_preferred_version_comes_before_our_own_and_before_path(machine):
    machine("bin/python3", "3.98.0")
    machine("pyenv/versions/3.99.0/bin/python", "3.99.0")
    assert find_python(">=3.11", prefer="3.99").version == "3.99.0"


def test_shim_of_a_version_that_is_not_activated(machine):
    shim = machine("bin/python3.98", "3.98.0")
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.98: command not found' >&2\nexit 127\n")
    machine("pyenv/versions/3.98.0/bin/python", "3.98.0")
    assert find_python(">=3.98").path == machine.folder / "pyenv/versions/3.98.0/bin/python"


@pytest.mark.parametrize(
    "facts", [{"level": "beta"}, {"implementation": "pypy"}, {"free_threaded": "true"}], ids=lambda facts: str(facts)
)
def test_interpreters_that_packages_are_not_made_for(machine, facts):
    machine("bin/python3", "3.98.0", **facts)
    assert find_python(">=3.98") is None


def test_things_that_are_no_interpreters(tmp_path):
    for name, content in {"text": "hello", "silent": "#!/bin/sh\n", "other": "#!/bin/sh\necho '{}'\n"}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
        assert probe(tmp_path / name) is None
    assert probe(tmp_path / "missing") is None
    assert probe(Path("/")) is None


def test_specifier_that_is_none():
    with pytest.raises(ValueError, match="'three' is not a version specifier"):
        find_python("three")
