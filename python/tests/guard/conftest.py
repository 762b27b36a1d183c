"""Fixtures for a save that stops in the middle of its copying."""

from __future__ import annotations

import threading

import pytest
from held_save import ONE, Held

import ringstow
from ringstow._saving import _guard, _handle, _jobs


@pytest.fixture
def held():
    one = Held()
    yield one
    one.release()
    for thread in threading.enumerate():
        if thread.name == "ringstow-save":
            thread.join(60)
    _jobs.unreported.clear()
    assert _guard._holds == []


@pytest.fixture
def save(held, tmp_path):
    """Return a function that starts a held save."""

    def start(state, staging="guard", path=tmp_path / "c"):
        return ringstow.save_async(held.state(state), path, config=ONE, staging=staging)

    return start


@pytest.fixture
def on_wait(held, monkeypatch):
    """Release the save once a call or a step waits for it; return a list of which waited."""
    waited = []
    wait, wait_copied = _guard.Hold.wait, _handle.ProcessHandle._wait_copied

    def hold_wait(hold):
        waited.append("step")
        held.release()
        wait(hold)

    def call_wait(handle):
        waited.append("call")
        held.release()
        wait_copied(handle)

    monkeypatch.setattr(_guard.Hold, "wait", hold_wait)
    monkeypatch.setattr(_handle.ProcessHandle, "_wait_copied", call_wait)
    return waited
