"""A handle's promises: when its methods return, which objects it keeps alive, forks."""

from __future__ import annotations

import gc
import os
import time

import fake_native
import pytest
import torch
from gates import elements, failing, join_watchers

import ringstow


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


def test_result_may_be_called_again(gate, state, tmp_path):
    gate()
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.result() is handle.result(timeout=0)
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            handle.result()


def test_timeouts_of_any_size_are_accepted(gate, state, tmp_path):
    gate(staging=False)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.wait_staged(-1) is False
    fake_native.gate.open()
    assert handle.wait_staged(float("inf")) is True
    handle.result(1e300)


def test_tensors_are_released_once_staged(gate, tmp_path):
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
    deadline = time.monotonic() + 300
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
    ringstow.save_async(state, tmp_path / "d").cancel()  # so that the next save does not raise it


def test_a_later_failure_leaves_wait_staged_true(gate, state, tmp_path):
    failing(gate)
    handle = ringstow.save_async(state, tmp_path / "c")
    assert handle.wait_staged() is True
    with pytest.raises(OSError, match="No space"):
        handle.result()


def test_save_continues_after_its_handle_is_dropped(gate, state, tmp_path):
    one = gate(staging=False)
    ringstow.save_async(state, tmp_path / "c")
    del state
    gc.collect()
    one.open()
    join_watchers()
    assert torch.equal(elements(tmp_path / "c", "w"), torch.arange(8.0))


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


def test_repr_shows_path_and_state(gate, state, tmp_path):
    gate()
    handle = ringstow.save_async(state, tmp_path / "c")
    handle.result()
    assert handle.path == str(tmp_path / "c")
    assert repr(handle) == f"<SaveHandle {str(tmp_path / 'c')!r} done>"
