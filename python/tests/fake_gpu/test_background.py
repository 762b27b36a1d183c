"""Background saves: work on the caller's stream before and after, and lifetimes of tensors."""

from __future__ import annotations

import errno
import gc
import threading

import pytest
import torch
from driver import AWHILE_S
from support import assert_same

import ringstow

SECONDS = 300


@pytest.fixture
def stream(gpu):
    return gpu.Stream(0)


def test_staging_waits_for_the_gpu_copies(gpu, on_gpu, at):
    tensor = on_gpu(torch.arange(1000.0))
    with gpu.held():
        handle = ringstow.save_async({"t": tensor}, at / "c")
        assert not handle.wait_staged(0)
        assert not handle.done()
    assert handle.wait_staged(SECONDS)
    handle.result(SECONDS)
    assert_same(ringstow.load(at / "c"), {"t": torch.arange(1000.0)})


def test_work_queued_before_the_call_is_saved(gpu, on_gpu, stream, at):
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    with gpu.stream(stream), gpu.blocked(stream):
        gpu.write(tensor, ones, stream)
        handle = ringstow.save_async({"t": tensor}, at / "c")
        assert not handle.wait_staged(AWHILE_S)
    handle.result(SECONDS)
    assert_same(ringstow.load(at / "c"), {"t": torch.ones(1000)})


def test_blocking_save_waits_for_queued_work(gpu, on_gpu, stream, at):
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    with gpu.stream(stream):
        gpu.write(tensor, ones, stream)
        ringstow.save({"t": tensor}, at / "c")
    assert_same(ringstow.load(at / "c"), {"t": torch.ones(1000)})


def test_tensors_are_held_until_staged(gpu, on_gpu, at):
    tensor = on_gpu(torch.arange(1000.0))
    with gpu.held():
        handle = ringstow.save_async({"t": tensor}, at / "c")
        del tensor
        gc.collect()
        # With its copy, because it is small. Freeing it now would also be a violation.
        assert gpu.live("allocations") == 2
    handle.result(SECONDS)
    handle._owners.clear()
    gc.collect()
    assert gpu.live("allocations") == 0
    assert_same(ringstow.load(at / "c"), {"t": torch.arange(1000.0)})


def test_saves_from_several_streams_at_once(gpu, on_gpu, at):
    handles = []
    tensors = [on_gpu(torch.zeros(500)) for _ in range(4)]
    values = [on_gpu(torch.full((500,), float(n))) for n in range(4)]
    with gpu.held():
        for n, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            stream = gpu.Stream(0)
            with gpu.stream(stream):
                gpu.write(tensor, value, stream)
                handles.append(ringstow.save_async({"t": tensor}, at / str(n)))
    for n, handle in enumerate(handles):
        handle.result(SECONDS)
        assert_same(ringstow.load(at / str(n)), {"t": torch.full((500,), float(n))})


def test_a_small_tensor_is_copied_on_the_gpu_at_the_call(gpu, on_gpu, stream, at):
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    with gpu.stream(stream):
        with gpu.held():
            handle = ringstow.save_async({"t": tensor}, at / "c")
            assert not handle.staged()
            gpu.write(tensor, ones, stream)  # without waiting
        handle.result(SECONDS)
    stream.synchronize()
    assert_same(ringstow.load(at / "c"), {"t": torch.zeros(1000)})
    assert_same(tensor.clone(), torch.ones(1000))


@pytest.mark.parametrize("staging", ["guard", "wait", "snapshot"])
@pytest.mark.parametrize("numel", [1000, 100_000])
def test_all_kinds_of_staging_save_the_values_of_the_call(staging, numel, gpu, on_gpu, stream, at):
    tensor, ones = on_gpu(torch.zeros(numel)), on_gpu(torch.ones(numel))
    with gpu.stream(stream):
        gpu.write(tensor, ones, stream)
        handle = ringstow.save_async({"t": tensor}, at / "c", staging=staging)
        assert handle.staged() or staging != "wait"
        if staging != "guard":
            zeros = gpu.write(tensor, on_gpu(torch.zeros(numel)), stream)
            stream.synchronize()
            del zeros
        handle.result(SECONDS)
    assert_same(ringstow.load(at / "c"), {"t": torch.ones(numel)})


def test_cancelled_save_holds_the_tensors_until_they_are_copied(gpu, on_gpu, at):
    """Regression: small ones were freed while the GPU still copied them."""
    tensor = on_gpu(torch.arange(1000.0))
    with gpu.held():
        handle = ringstow.save_async({"t": tensor}, at / "c")
        del tensor
        handle.cancel()
        with pytest.raises(TimeoutError):
            handle.result(AWHILE_S)
        gc.collect()
        assert gpu.live("allocations") == 2
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result(SECONDS)
    assert not (at / "c" / "manifest.json").exists()


def test_save_that_cannot_start_waits_for_its_copies(gpu, on_gpu, at):
    """Regression: as above."""
    (at / "c").write_text("a file")
    state, raised = {"t": on_gpu(torch.arange(1000.0))}, []

    def save():
        try:
            ringstow.save_async(state, at / "c").result()
        except OSError as error:
            raised.append(error.errno)

    with gpu.held():
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(AWHILE_S)
        assert thread.is_alive()
        assert gpu.live("allocations") == 2
    thread.join(SECONDS)
    assert raised == [errno.ENOTDIR]
