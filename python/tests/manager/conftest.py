"""The path of the helpers in the folder above, and the names that these tests share."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from ringstow._saving import _jobs


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_failure_is_left():
    """Every failure of a background save has reached the caller, or the test says otherwise."""
    yield
    left, _jobs.unreported[:] = list(_jobs.unreported), []
    assert left == []
