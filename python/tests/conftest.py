"""Fixtures of all tests here."""

import pytest


@pytest.fixture
def at(tmp_path):
    return tmp_path
