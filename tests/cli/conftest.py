"""The command line in this process, over a catalogue of toy methods."""

import pytest
from typer.testing import CliRunner

from cameraready.cli.app import app
from tests.cli import toy_room


@pytest.fixture(autouse=True)
def away(tmp_path, monkeypatch):
    """A working folder and a home of the test's own."""
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CAMERAREADY_DEBUG", raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def toys(tmp_path):
    """The catalogue holds the room `toys` and nothing else."""
    with toy_room.installed(tmp_path / "package") as root:
        yield root


@pytest.fixture
def cli():
    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    return call
