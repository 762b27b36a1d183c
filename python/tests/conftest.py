"""What all tests here have."""

import pytest


@pytest.fixture
def at(tmp_path):
    return tmp_path
