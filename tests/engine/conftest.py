"""What every test of the engine wants."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Rows this small are slower on several threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
