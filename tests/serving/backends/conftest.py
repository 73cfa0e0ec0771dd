"""Backends set how many threads torch uses in this process; other tests find it as it was."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
