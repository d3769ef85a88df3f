"""What tests of the room share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Models as small as those of the tests lose more to a second thread than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
