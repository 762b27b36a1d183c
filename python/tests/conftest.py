"""Fixtures of all tests here."""

import pytest


@pytest.fixture
def at(tmp_path):
    return tmp_path


@pytest.fixture
def one_thread():
    """Make torch compute in one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
