"""The documentation, built once for all tests of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture
def generator(monkeypatch):
    """The modules that make the generated pages."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generator"))
    import finding
    import hooks
    import methods

    return {"finding": finding, "hooks": hooks, "methods": methods}
