"""What tests of the room share: one thread, no telemetry, global random states and the progress bars of others left as they were."""

import pytest

from tests.posttraining.training import untouched_randomness


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Models as small as those of the tests lose more to a second thread than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_trl(monkeypatch):
    """A TRL trainer tells the hub when it is made; those of tests do not. Nor is its warning repeated."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # of `rollout_func`, in which both supported versions agree


@pytest.fixture(autouse=True)
def randomness():
    """A trainer seeds the global generators when it is made; other tests do not notice."""
    with untouched_randomness():
        yield
