"""What tests of the room share: one thread, and global random states left as they were found."""

import importlib
import importlib.util
import subprocess
import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Networks as small as those of the tests lose more to a second thread than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """diffusers tells the hub what is loaded; what tests load stays here."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session")
def torchcfm(tmp_path_factory):
    """torchcfm; where it is not installed, it alone from the package registry, for one of its dependencies wants torchvision."""
    if importlib.util.find_spec("torchcfm") is None:
        folder = str(tmp_path_factory.mktemp("torchcfm"))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            folder,
        ]
        try:
            done = subprocess.run(
                [*command, "torchcfm==1.0.7", "POT>=0.9.5"], capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            pytest.skip("torchcfm cannot be had from the package registry within two minutes")
        if done.returncode:
            pytest.skip(f"torchcfm cannot be had from the package registry: {done.stderr.strip()[-200:]}")
        sys.path.append(folder)
    return importlib.import_module("torchcfm")
