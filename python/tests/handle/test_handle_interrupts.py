"""Interrupts and threads at the start and end of a save."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
from unittest.mock import Mock

import fake_native
import pytest
from gates import join_watchers
from support import python

import ringstow
from ringstow import _native
from ringstow._saving import _guard, _jobs


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_signal_handler_saves_during_an_import(gate, state, tmp_path, monkeypatch):
    """The handler holds the import lock; a save that needed it to end would deadlock."""
    one = gate(end=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ringstow._reports._io_reports", None)  # importing it fails
        one.open()
        join_watchers()
    assert handle.result().tensor_bytes == 32


def test_ctrl_c_in_save_cancels_it_and_waits(gate, state, tmp_path, monkeypatch):
    gate(staging=False)
    jobs = []

    def start(*args, **options):
        jobs.append(fake_native.SaveJob(*args[:3]))
        return jobs[0]

    interrupts = iter([True, True])

    def interrupted(wait):
        def call(job, timeout=None, *, logs=True):
            in_main = threading.current_thread() is threading.main_thread()
            if in_main and next(interrupts, False):
                raise KeyboardInterrupt
            return wait(job, timeout)

        return call

    monkeypatch.setattr(_native, "start_save", start)
    for name in ("wait_staged", "wait"):
        wait = interrupted(getattr(fake_native.SaveJob, name))
        monkeypatch.setattr(fake_native.SaveJob, name, wait)
    with pytest.raises(KeyboardInterrupt):
        ringstow.save(state, tmp_path / "c")
    assert jobs[0].done()
    assert str(tmp_path / "c") not in fake_native.saved


@pytest.fixture
def no_thread(monkeypatch):
    """Prevent a save's watcher thread from starting, as at the interpreter's exit."""
    real = threading.Thread.start

    def start(self):
        if self.name == "ringstow-save":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_thread_that_cannot_start_ends_the_save(gate, state, tmp_path, no_thread):
    gate(staging=False)
    with pytest.raises(RuntimeError, match="can't start"):
        ringstow.save_async(state, tmp_path / "c")
    assert str(tmp_path / "c") not in fake_native.saved
    assert not _jobs.unreported


def test_blocking_save_starts_no_thread(gate, state, tmp_path, monkeypatch):
    """Python 3.12 can't start threads in `atexit`; 3.11 may hang doing so in a signal handler."""
    from ringstow.convert import _sources, _targets

    started = []
    gate()
    monkeypatch.setattr(_native, "start_save", lambda *args, **options: ended)
    ended = fake_native.SaveJob([], "{}", str(tmp_path / "c"))
    monkeypatch.setattr(threading.Thread, "start", started.append)
    ringstow.save(state, tmp_path / "c")
    monkeypatch.setattr(_native, "start_export", lambda *args: ended)
    options = _sources.Options(
        allow_pickle=False,
        overwrite=False,
        verify=True,
        config=ringstow.Config(),
        prefix="",
        dtype=None,
        max_shard_bytes=1 << 30,
    )
    for write in _targets.to_hf, _targets.to_ringstow:
        write(state, str(tmp_path / "c"), lambda *args: None, options)
    assert started == []


class _CtrlC:
    """Raises KeyboardInterrupt in ringstow's Python code, at the given point.

    Python handles signals when a function begins, and when a C function returns.
    """

    def __init__(self, moment):
        self._left = moment
        self._package = os.path.dirname(ringstow.__file__)

    def __call__(self, frame, event, arg):
        is_ours = frame.f_code.co_filename.startswith(self._package)
        if is_ours and event in ("call", "c_return"):
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt


def test_ctrl_c_within_the_call_leaves_no_orphaned_save(gate, state, tmp_path, monkeypatch):
    jobs = {}

    def start(*args, **options):
        jobs[args[2]] = fake_native.SaveJob(*args[:3])
        return jobs[args[2]]

    monkeypatch.setattr(_native, "start_save", start)
    gc.collect()  # handles of other tests
    for moment in itertools.count():
        path, handle = str(tmp_path / str(moment)), None
        gate(staging=False)
        sys.setprofile(_CtrlC(moment))
        with contextlib.suppress(KeyboardInterrupt):
            handle = ringstow.save_async(state, path)
        sys.setprofile(None)
        if handle is not None:
            handle.cancel()
            break
        assert path not in jobs or jobs[path].done()
        assert path not in fake_native.saved
        assert not _jobs.unreported
        assert not _guard._holds
        assert gc.get_threshold()[0] < 1_000_000
    assert 3 < len(jobs) < moment


def test_ctrl_c_while_a_failed_save_waits_for_its_copies_lets_steps_go(tmp_path, monkeypatch):
    """Regression: steps of other threads waited for ever."""
    monkeypatch.setattr(_guard.Hold, "wait_copied", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ringstow.save_async({"a": threading.Lock()}, tmp_path / "c")
    assert not _guard._holds


def test_save_imports_everything_before_any_thread(tmp_path):
    """A child forked while a thread imports would wait forever for that import."""
    program = """
import sys, threading, ringstow
start = threading.Thread.start
def check(thread):
    assert 'ringstow._reports._io_reports' in sys.modules
    start(thread)
threading.Thread.start = check
ringstow.save_async({'a': 1}, sys.argv[1]).result()
"""
    done = python(program, tmp_path / "c")
    assert done.returncode == 0, done.stderr
