"""A failure that the caller never retrieves is reported once."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import weakref

import fake_native
import pytest
import torch
from gates import errors, failing, join_watchers

import ringstow
from ringstow._saving import _jobs


@pytest.mark.parametrize("save", [ringstow.save, ringstow.save_async])
def test_unreported_failure_is_logged_by_the_next_save(save, gate, state, tmp_path, caplog):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    join_watchers()
    gate()
    save(state, tmp_path / "d")
    join_watchers()
    assert str(tmp_path / "d") in fake_native.saved
    (logged,) = errors(caplog)
    assert str(tmp_path / "c") in logged.getMessage()
    save(state, tmp_path / "d")
    assert handle._failure in _jobs.unreported  # the exit would fail
    with pytest.raises(OSError, match="No space"):
        handle.result()
    assert not _jobs.unreported
    del handle
    gc.collect()
    assert len(errors(caplog)) == 1


def test_several_failures_are_logged_and_stay_available(gate, state, tmp_path, caplog):
    one = failing(gate, end=False)
    handles = [ringstow.save_async(state, tmp_path / name) for name in "abc"]
    one.end.set()
    join_watchers()
    gate()
    ringstow.save(state, tmp_path / "d")
    assert len(errors(caplog)) == len(handles)
    for handle in handles:
        with pytest.raises(OSError, match="No space"):
            handle.result()


def test_failure_raised_by_result_is_not_logged_again(gate, state, tmp_path, caplog):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    with pytest.raises(OSError, match="No space"):
        handle.result()
    join_watchers()
    gate()
    ringstow.save(state, tmp_path / "c")
    del handle
    gc.collect()
    assert errors(caplog) == []


def test_raised_failure_keeps_no_tensor_alive(gate, state, tmp_path):
    one = failing(gate)

    def train():
        weights = torch.ones(3)
        kept = weakref.ref(weights)
        handle = ringstow.save_async(state, tmp_path)
        with pytest.raises(OSError, match="No space"):
            handle.result()
        one.end_error = None
        return kept

    kept = train()
    join_watchers()
    gc.collect()
    assert kept() is None


def test_dropping_the_handle_of_a_failed_save_logs_it(gate, state, tmp_path, caplog):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    join_watchers()
    assert errors(caplog) == []
    del handle
    gc.collect()
    assert "No space" in errors(caplog)[0].getMessage()
    with pytest.raises(OSError, match="No space"):
        ringstow.save(state, tmp_path / "c")
    assert len(errors(caplog)) == 1


def test_failure_after_the_handle_was_dropped_is_logged(gate, state, tmp_path, caplog):
    one = failing(gate, end=False)
    ringstow.save_async(state, tmp_path / "c")
    gc.collect()
    one.end.set()
    join_watchers()
    assert len(errors(caplog)) == 1


class _Others(logging.Handler):
    """Checks, while a failure is logged, that other threads can use handles."""

    def __init__(self):
        super().__init__()
        self.could = []

    def emit(self, record):
        def use():
            with contextlib.suppress(OSError):  # the failure that is not reported yet
                ringstow.save_async({"a": 1}, "unused").result()
            used.append(True)

        used = []
        other = threading.Thread(target=use, daemon=True)
        other.start()
        other.join(10)
        self.could.append(bool(used))


@pytest.mark.parametrize("moment", ["dropped", "failed", "next save"])
def test_other_threads_save_while_a_failure_is_logged(moment, gate, state, tmp_path):
    """A logging handler has its own lock, and a thread that holds it may drop a save's handle."""
    one = failing(gate, end=moment != "failed")
    handle, others = ringstow.save_async(state, tmp_path / "c"), _Others()
    gate()
    logging.getLogger("ringstow").addHandler(others)
    try:
        if moment == "failed":
            del handle
            one.open()
        join_watchers()
        if moment == "dropped":
            del handle
        elif moment == "next save":
            ringstow.save(state, tmp_path / "d")
    finally:
        logging.getLogger("ringstow").removeHandler(others)
    assert others.could == [True]


def test_cancelled_save_is_not_reported_as_a_failure(gate, state, tmp_path, caplog):
    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()
    gate()
    ringstow.save(state, tmp_path / "c")
    handle.cancel()  # too late, and harmless
    assert errors(caplog) == []


def test_a_forked_child_does_not_inherit_failures(gate, state, tmp_path):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    join_watchers()
    child = os.fork()
    if child == 0:
        os._exit(len(_jobs.unreported))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(OSError, match="No space"):
        handle.result()


def test_failure_of_save_is_reported_to_its_caller_only(gate, state, tmp_path, monkeypatch):
    """`save` is about to raise in one thread; meanwhile another thread saves."""
    failing(gate)
    ended, may_raise = threading.Event(), threading.Event()
    report = _jobs.Claim.report

    def late(claim):
        if threading.current_thread() is thread:
            ended.set()
            may_raise.wait(10)
        return report(claim)

    def save():
        with pytest.raises(OSError, match="No space left"):
            ringstow.save(state, tmp_path / "bad")
        raised.append(True)

    raised = []
    thread = threading.Thread(target=save)
    monkeypatch.setattr(_jobs.Claim, "report", late)
    thread.start()
    assert ended.wait(10)
    gate()
    assert ringstow.save(state, tmp_path / "good").path == str(tmp_path / "good")
    may_raise.set()
    thread.join(10)
    assert raised
