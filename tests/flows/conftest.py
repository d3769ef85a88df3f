"""What tests of the room share: one thread, and global random states left as they were found."""

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
