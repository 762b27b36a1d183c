"""The path of the helpers in the folder above, and the names that these tests share."""

from __future__ import annotations

import pathlib
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from ringstow._manager import _after_save
from ringstow._saving import _jobs


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def removal(monkeypatch):
    """Hold each save in its last part, the removal of old steps.

    Return two events: a removal has begun, and it may go on.
    """
    begun, may_go_on, clear = threading.Event(), threading.Event(), _after_save.cleared

    def held(*given):
        begun.set()
        assert may_go_on.wait(60)
        return clear(*given)

    monkeypatch.setattr(_after_save, "cleared", held)
    yield begun, may_go_on
    may_go_on.set()


@pytest.fixture(autouse=True)
def _no_failure_is_left():
    """Every failure of a background save has reached the caller, or the test says otherwise."""
    yield
    left, _jobs.unreported[:] = list(_jobs.unreported), []
    assert left == []
