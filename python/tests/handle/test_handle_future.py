"""A handle is a future, and can be awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc

import fake_native
import pytest
from gates import errors, failing, join_watchers

import ringstow
from ringstow._saving import _jobs


def test_cancelled_save_is_not_a_cancelled_task():
    for theirs in (asyncio.CancelledError, concurrent.futures.CancelledError):
        assert not issubclass(ringstow.SaveCancelledError, theirs)
        assert not issubclass(theirs, ringstow.SaveCancelledError)
    names: dict[str, object] = {}
    exec("from asyncio import *\nfrom ringstow import *", names)
    assert names["CancelledError"] is asyncio.CancelledError


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


def test_asyncio_waits_for_several_wrapped_handles(gate, state, tmp_path):
    async def save():
        handles = [ringstow.save_async(state, tmp_path / name) for name in "ab"]
        wrapped = [asyncio.wrap_future(handle) for handle in handles]
        done, late = await asyncio.wait(wrapped)
        gathered = await asyncio.gather(*handles)
        assert {task.result() for task in done} == {*gathered}
        return len(gathered), late

    gate()
    assert asyncio.run(save()) == (2, set())


@pytest.fixture
def snapshots(monkeypatch):
    """Make asyncio read a future through its snapshot, as Python 3.15 does."""

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


def test_snapshot_of_unfinished_save_claims_no_failure(snapshots, gate, state, tmp_path):
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
