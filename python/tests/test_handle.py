"""What a handle promises, against a stand-in that can be held up and let fail at any moment."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import logging
import os
import sys
import threading
import time
import weakref

import fake_native
import pytest
import torch

import ringstow
from ringstow import _guard, _jobs, _native


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    """Lets saves go to the stand-in; leaves no failure behind."""
    monkeypatch.setattr(_native, "start_save", fake_native.start_save)
    yield
    for thread in watchers():
        thread.join()
    _jobs.unreported.clear()


@pytest.fixture
def gate(monkeypatch):
    """Returns a function that sets the gate which the saves that follow pass."""
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


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "ringstow-save"]


def elements(path, name):
    return torch.frombuffer(bytearray(fake_native.saved[str(path)][0][name]), dtype=torch.float32)


def join_watchers():
    for thread in watchers():
        thread.join(10)


def failing(gate, error=None, **options):
    one = gate(**options)
    one.end_error = error or OSError(28, "No space left on device")
    return one


def test_save_async_returns_before_anything_is_staged(gate, state, tmp_path):
    one = gate(staging=False, end=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert not handle.staged()
    assert not handle.done()
    assert handle.progress() == ringstow.Progress(0, 0, 32)
    assert handle.wait_staged(0.01) is False
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        handle.result(0.01)
    one.staging.set()
    assert handle.wait_staged() is True
    assert not handle.done()
    one.end.set()
    assert handle.result().tensor_bytes == 32
    assert handle.done()


def test_result_may_be_asked_again(gate, state, tmp_path):
    gate()
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.result() is handle.result(timeout=0)
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            handle.result()


def test_timeouts_of_any_size_are_taken(gate, state, tmp_path):
    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.wait_staged(-1) is False
    fake_native.gate.open()
    assert handle.wait_staged(float("inf")) is True
    handle.result(1e300)


def test_tensors_are_kept_until_staged_and_then_let_go(gate, tmp_path):
    one = gate(staging=False, end=False)
    tensor = torch.arange(100_000.0)
    address = tensor.data_ptr()
    handle = ringstow.save_async({"t": tensor}, tmp_path / "c")
    del tensor
    other = torch.zeros(100_000)
    assert other.data_ptr() != address
    assert handle._owners
    one.staging.set()
    handle.wait_staged()
    deadline = time.monotonic() + 10
    while handle._owners and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not handle._owners
    assert not handle.done()
    one.end.set()
    handle.result()
    assert torch.equal(elements(tmp_path / "c", "t"), torch.arange(100_000.0))


def test_staging_that_fails_raises_from_wait_staged(gate, state, tmp_path):
    gate().staging_error = OSError(5, "Input/output error")
    handle = ringstow.save_async(state, tmp_path / "c")
    with pytest.raises(OSError, match="Input/output"):
        handle.wait_staged()
    assert not handle.staged()
    ringstow.save_async(state, tmp_path / "d").cancel()  # and the next save does not raise it


def test_a_later_failure_leaves_wait_staged_true(gate, state, tmp_path):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.wait_staged() is True
    with pytest.raises(OSError, match="No space"):
        handle.result()


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


def errors(caplog):
    return [r for r in caplog.records if r.name == "ringstow" and r.levelno == logging.ERROR]


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


def test_a_save_goes_on_after_its_handle_was_dropped(gate, state, tmp_path):
    one = gate(staging=False)
    ringstow.save_async(state, tmp_path / "c")
    del state
    gc.collect()
    one.open()
    join_watchers()
    assert torch.equal(elements(tmp_path / "c", "w"), torch.arange(8.0))


class _Others(logging.Handler):
    """Notes, while a failure is logged, whether other threads can use handles meanwhile."""

    def __init__(self):
        super().__init__()
        self.could = []

    def emit(self, record):
        def use():
            with contextlib.suppress(OSError):  # which nobody has been told of yet
                ringstow.save_async({"a": 1}, "unused").result()
            used.append(True)

        used = []
        other = threading.Thread(target=use, daemon=True)
        other.start()
        other.join(10)
        self.could.append(bool(used))


@pytest.mark.parametrize("moment", ["dropped", "failed", "next save"])
def test_other_threads_save_while_a_failure_is_logged(moment, gate, state, tmp_path):
    """A logging handler has a lock of its own, and a thread that holds it may drop a handle."""
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


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_signal_handler_saves_during_an_import(gate, state, tmp_path, monkeypatch):
    """It has the import's lock: were that wanted at a save's end, neither would ever go on."""
    one = gate(end=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ringstow._report", None)  # whoever imports it fails
        one.open()
        join_watchers()
    assert handle.result().tensor_bytes == 32


def test_cancelled_save_is_not_a_cancelled_task():
    for theirs in (asyncio.CancelledError, concurrent.futures.CancelledError):
        assert not issubclass(ringstow.SaveCancelledError, theirs)
        assert not issubclass(theirs, ringstow.SaveCancelledError)
    names: dict[str, object] = {}
    exec("from asyncio import *\nfrom ringstow import *", names)
    assert names["CancelledError"] is asyncio.CancelledError


def test_cancelling_is_no_failure_to_be_told_of(gate, state, tmp_path, caplog):
    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()
    gate()
    ringstow.save(state, tmp_path / "c")
    handle.cancel()  # too late, and harmless
    assert errors(caplog) == []


def test_a_handle_is_a_future(gate, state, tmp_path):
    one = gate(end=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    called = []
    handle.add_done_callback(called.append)
    assert isinstance(handle, concurrent.futures.Future)
    assert handle.running()
    assert concurrent.futures.wait([handle], timeout=0).not_done == {handle}
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        handle.exception(0.01)
    one.open()
    assert concurrent.futures.wait([handle]).done == {handle}
    join_watchers()
    assert called == [handle]
    assert handle.exception() is None
    assert not handle.cancel()
    handle.add_done_callback(called.append)
    assert called == [handle, handle]


@pytest.mark.parametrize("awaits", [lambda handle: handle, asyncio.wrap_future])
def test_a_handle_can_be_awaited(awaits, gate, state, tmp_path, caplog):
    async def save():
        return await awaits(ringstow.save_async(state, tmp_path / "c"))

    gate()
    assert asyncio.run(save()).tensor_bytes == 32
    failing(gate)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(save())
    gate().end_error = ringstow.SaveCancelledError("it was", path="c")
    with pytest.raises(ringstow.SaveCancelledError):
        asyncio.run(save())
    join_watchers()
    assert not _jobs.unreported
    assert errors(caplog) == []


@pytest.fixture
def snapshots(monkeypatch):
    """Lets asyncio read a future by its snapshot, as Python 3.15 does."""

    def snapshot(future):
        if not concurrent.futures.Future.done(future):
            return False, False, None, None
        return True, False, future._result, future._exception

    def copy_state(source, target):
        done, _, result, error = source._get_snapshot()
        assert done
        if error is None:
            target.set_result(result)
        else:
            target.set_exception(error)

    monkeypatch.setattr(concurrent.futures.Future, "_get_snapshot", snapshot, raising=False)
    monkeypatch.setattr(asyncio.futures, "_copy_future_state", copy_state)


def test_awaited_failure_is_not_logged_under_python_3_15(snapshots, gate, state, tmp_path):
    async def save():
        return await ringstow.save_async(state, tmp_path / "c")

    gate()
    assert asyncio.run(save()).tensor_bytes == 32
    failing(gate)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(save())
    join_watchers()
    assert not _jobs.unreported


def test_snapshot_of_an_unfinished_save_asks_for_no_failure(snapshots, gate, state, tmp_path):
    failing(gate, end=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.running()
    assert not handle._get_snapshot()[0]
    fake_native.gate.end.set()
    join_watchers()
    assert _jobs.unreported
    assert not handle.running()


def test_cancelled_task_cancels_the_awaited_save(gate, state, tmp_path):
    async def save():
        task = asyncio.ensure_future(asyncio.wrap_future(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    asyncio.run(save())
    assert isinstance(handle.exception(), ringstow.SaveCancelledError)
    assert not handle.cancelled()
    assert str(tmp_path / "c") not in fake_native.saved


def test_a_failure_that_exception_returned_is_not_logged(gate, state, tmp_path, caplog):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert isinstance(handle.exception(), OSError)
    join_watchers()
    del handle
    gc.collect()
    assert errors(caplog) == []
    assert not _jobs.unreported


def test_ctrl_c_in_save_cancels_it_and_waits_for_its_end(gate, state, tmp_path, monkeypatch):
    gate(staging=False)
    jobs = []

    def start(*args):
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
    """Lets no thread start that watches over a save, as at the interpreter's exit."""
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


def test_a_save_that_is_waited_for_starts_no_thread(gate, state, tmp_path, monkeypatch):
    """Python 3.12 starts none in functions of `atexit`; in a signal handler, 3.11 may hang."""
    from ringstow.convert import _targets

    started = []
    gate()
    monkeypatch.setattr(_native, "start_save", lambda *args: ended)
    ended = fake_native.SaveJob([], "{}", str(tmp_path / "c"))
    monkeypatch.setattr(threading.Thread, "start", started.append)
    ringstow.save(state, tmp_path / "c")
    monkeypatch.setattr(_native, "start_export", lambda *args: ended)
    _targets.to_hf(
        state,
        str(tmp_path / "c"),
        lambda *args: None,
        config=ringstow.Config(),
        prefix="",
        dtype=None,
        max_shard_bytes=1 << 30,
    )
    assert started == []


class _CtrlC:
    """Raises KeyboardInterrupt in ringstow's Python, at one moment at which a signal may be seen.

    Those are the beginning of each function, and the return from each that is not Python's.
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

    def start(*args):
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
        assert gc.isenabled()
    assert 3 < len(jobs) < moment


def test_handle_in_a_forked_child_raises(gate, state, tmp_path):
    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    child = os.fork()
    if child == 0:
        os._exit(ask_everything(handle))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not handle.done()


def ask_everything(handle):
    asks = [handle.wait_staged, handle.result, handle.done, handle.staged, handle.progress]
    asks += [handle.cancel, handle.exception, lambda: handle.add_done_callback(print)]
    asks += [handle.running, handle.cancelled]
    for ask in asks:
        try:
            ask()
        except ringstow.Error as error:
            if "forked" not in str(error):
                return 1
        else:
            return 2
    return 0 if "another process" in repr(handle) else 3


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


def test_the_handle_shows_what_it_is(gate, state, tmp_path):
    gate()
    handle = ringstow.save_async(state, tmp_path / "c")
    handle.result()
    assert handle.path == str(tmp_path / "c")
    assert repr(handle) == f"<SaveHandle {str(tmp_path / 'c')!r} done>"


def test_the_failure_of_an_awaited_save_is_its_callers_alone(gate, state, tmp_path, monkeypatch):
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


def test_save_imports_all_before_it_starts_a_thread(gate, state, tmp_path):
    """A child forked while a thread imports would wait for ever for that import to end."""
    import subprocess
    import sys

    program = (
        "import sys, threading, ringstow\n"
        "start = threading.Thread.start\n"
        "def check(thread):\n"
        "    assert 'ringstow._report' in sys.modules\n"
        "    start(thread)\n"
        "threading.Thread.start = check\n"
        f"ringstow.save_async({{'a': 1}}, {str(tmp_path / 'c')!r}).result()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
