import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """One thread, which is quick for small tensors, unless the environment says how many."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)
