"""Callbacks of `on_done`: which saves and loads they hear of, and that they disturb none."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import python, wait_for_saves

import ringstow
from ringstow._reports import _done_callbacks
from ringstow._saving import _jobs

STATE = {"w": np.arange(1000.0), "step": 1}


@pytest.fixture
def heard():
    """Return the outcomes so far, with a listener in place."""
    outcomes = []
    with ringstow.on_done(outcomes.append):
        yield outcomes


def told(outcomes):
    """Return what the callbacks have heard of all that has ended."""
    _done_callbacks.flush()
    return outcomes


def test_callback_gets_the_reports_of_save_and_load(heard, at):
    saved = ringstow.save(STATE, at / "c", step=7)
    ringstow.load(at / "c")
    into = ringstow.load_into({"w": np.zeros(1000), "step": 0}, at / "c")
    save, load, second = told(heard)
    assert (save.kind, save.path, save.step, save.error) == ("save", str(at / "c"), 7, None)
    assert save.report == saved
    assert (load.kind, load.path, load.step, load.error) == ("load", str(at / "c"), None, None)
    assert (load.report.tensors, load.report.tensor_bytes) == (1, 8000)
    assert second.report == into


def test_callback_hears_of_a_background_save_whose_result_was_returned(at):
    for _ in range(20):
        outcomes = []
        with ringstow.on_done(outcomes.append):
            report = ringstow.save_async(STATE, at / "c", step=8).result()
        assert [(one.report, one.step) for one in outcomes] == [(report, 8)]


def test_callback_gets_the_error_of_each_failure(heard, at):
    (at / "file").write_text("")
    (at / "empty").mkdir()
    with pytest.raises(NotADirectoryError) as sync:
        ringstow.save(STATE, at / "file" / "c")
    with pytest.raises(NotADirectoryError) as background:
        ringstow.save_async(STATE, at / "file" / "c").result()
    with pytest.raises(ringstow.InvalidStateError) as refused:
        ringstow.save_async({"f": open}, at / "c")
    with pytest.raises(ringstow.NoCheckpointError) as unread:
        ringstow.load(at / "empty")
    with pytest.raises(ringstow.NoCheckpointError) as unfilled:
        ringstow.load_into({}, at / "empty")
    errors = [one.value for one in (sync, background, refused, unread, unfilled)]
    assert [one.error for one in told(heard)] == errors
    assert [one.kind for one in heard] == ["save"] * 3 + ["load"] * 2
    assert {one.report for one in heard} == {None}


def test_failure_that_only_a_callback_hears_of_is_still_reported(heard, at):
    (at / "file").write_text("")
    handle = ringstow.save_async(STATE, at / "file" / "c")
    while not handle.done():
        handle._job.wait()
    wait_for_saves()
    assert len(told(heard)) == 1
    assert len(_jobs.unreported) == 1
    handle.exception()
    assert not _jobs.unreported


def test_callback_that_raises_is_logged_once_and_fails_no_save(heard, at, caplog):
    def broken(outcome):
        raise SystemExit("no dashboard")

    with ringstow.on_done(broken):
        ringstow.save(STATE, at / "c")
        ringstow.save_async(STATE, at / "c").result()
        ringstow.load(at / "c")
        assert len(told(heard)) == 3  # a failing callback does not keep others from being called
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "no dashboard" in record.getMessage()
    assert record.exc_info


def test_callback_that_hangs_holds_up_no_save(at):
    may_return, was_called = threading.Event(), threading.Event()

    def hangs(outcome):
        was_called.set()
        assert may_return.wait(300)

    listener = ringstow.on_done(hangs)
    try:
        ringstow.save(STATE, at / "c")
        assert was_called.wait(300)
        ringstow.save_async(STATE, at / "c").result()
        ringstow.load(at / "c")
        assert not _done_callbacks.flush(0)
    finally:
        may_return.set()
        listener.remove()


def test_callback_may_save_and_remove_itself(at):
    outcomes = []

    def again(outcome):
        outcomes.append(outcome)
        listener.remove()
        ringstow.save(STATE, at / "copy")

    listener = ringstow.on_done(again)
    ringstow.save(STATE, at / "c")
    assert [one.path for one in told(outcomes)] == [str(at / "c")]
    assert ringstow.latest(at).path == str(at / "copy")


def test_removed_callback_is_not_called(at):
    outcomes = []
    listener = ringstow.on_done(outcomes.append)
    ringstow.save(STATE, at / "c")
    listener.remove()
    assert len(outcomes) == 1  # what ended before
    ringstow.save(STATE, at / "c")
    assert len(told(outcomes)) == 1
    listener.remove()
    assert "removed" in repr(listener)


def test_callback_does_not_hear_of_what_ended_before_it_was_there(at):
    may_return, outcomes = threading.Event(), []
    with ringstow.on_done(lambda outcome: may_return.wait(300)):
        ringstow.save(STATE, at / "c")
        listener = ringstow.on_done(outcomes.append)
        may_return.set()
        listener.remove()
    assert outcomes == []


def test_no_outcome_is_lost_when_many_threads_save(at):
    outcomes = []

    def saves(number):
        for _ in range(20):
            ringstow.save(STATE, at / str(number))

    with ringstow.on_done(outcomes.append), ThreadPoolExecutor(4) as threads:
        list(threads.map(saves, range(4)))
    assert len(outcomes) == 80


def test_exit_waits_for_callbacks_and_not_for_one_that_hangs(at):
    code = """
import sys, threading, ringstow
held = threading.Event()
def slow(outcome):
    if sys.argv[2] == "hangs":
        held.wait()
    print("heard", outcome.kind, flush=True)
ringstow._reports._done_callbacks._EXIT_S = 60 if sys.argv[2] == "ends" else 0.01
ringstow.on_done(slow)
ringstow.save_async({"a": 1}, sys.argv[1])
"""
    done = python(code, at / "c", "ends")
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard save\n", "")
    done = python(code, at / "c", "hangs")
    assert (done.returncode, done.stdout) == (0, "")
    assert "exiting without it" in done.stderr


def test_signal_handler_saves_while_the_interrupted_code_holds_a_callbacks_lock(at):
    code = """
import signal, sys, threading, ringstow
lock = threading.Lock()  # such as a metric's, which cannot be taken twice
def count(outcome):
    with lock:
        print("heard", flush=True)
ringstow.on_done(count)
def save(*_):
    ringstow.save({"a": 1}, sys.argv[1])
    ringstow.save_async({"a": 1}, sys.argv[1]).result()
signal.signal(signal.SIGUSR1, save)
with lock:
    signal.raise_signal(signal.SIGUSR1)
"""
    done = python(code, at / "c")  # fails if it hangs
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n" * 2, "")


def test_forked_child_has_no_callbacks_of_its_parent(at):
    code = """
import os, sys, ringstow
ringstow.on_done(lambda outcome: print(os.path.basename(outcome.path), flush=True))
ringstow.save({"a": 1}, sys.argv[1] + "/parent")
ringstow._reports._done_callbacks.flush()
pid = os.fork()
if pid == 0:
    ringstow.save({"a": 1}, sys.argv[1] + "/child")
    ringstow.on_done(lambda outcome: print("own", flush=True))
    ringstow.save({"a": 1}, sys.argv[1] + "/child")
    ringstow._reports._done_callbacks.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = python(code, at)
    assert (done.returncode, done.stdout) == (0, "parent\nown\n"), done.stderr
