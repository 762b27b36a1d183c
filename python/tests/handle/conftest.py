"""Fixtures for the stand-in for native saves, which tests can hold or fail at any moment."""

from __future__ import annotations

import fake_native
import pytest
import torch
from gates import watchers

from ringstow import _native
from ringstow._saving import _jobs


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    """Redirect saves to the stand-in; leave no failure behind."""
    monkeypatch.setattr(_native, "start_save", fake_native.start_save)
    yield
    for thread in watchers():
        thread.join()
    _jobs.unreported.clear()


@pytest.fixture
def gate(monkeypatch):
    """Return a function that sets the gate of the following saves."""
    gates = []

    def install(**options):
        gates.append(fake_native.Gate(**options))
        monkeypatch.setattr(fake_native, "gate", gates[-1])
        return gates[-1]

    yield install
    for one in gates:
        one.open()


@pytest.fixture
def state():
    return {"w": torch.arange(8.0), "step": 1}
