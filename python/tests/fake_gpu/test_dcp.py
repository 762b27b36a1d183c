"""torch.distributed.checkpoint with GPU tensors: every way of staging, and loading in place."""

from __future__ import annotations

import concurrent.futures
import gc
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from driver import AWHILE_S
from states import blank, every_kind, load, plain
from support import assert_same
from test_dcp_async import STAGERS, WITH_STAGERS, Held, background
from test_load import host
from torch_has import needs_async_stager, needs_background_process

import ringstow
from ringstow.dcp import StorageReader, StorageWriter, _snapshot, _writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:The function definition for SavePlanner"),
    pytest.mark.filterwarnings("ignore:ShardedTensor"),
]

SECONDS = 300


@pytest.fixture
def writer():
    writer = StorageWriter()
    yield writer
    writer.close()


def moved(value, on_gpu):
    """Return the state with its tensors on a GPU; conjugated views stay conjugated."""
    if isinstance(value, torch.Tensor):
        if value.is_conj():
            return on_gpu(value.conj()).conj()
        return plain(value) if value.is_neg() else on_gpu(value)
    if isinstance(value, dict):
        return {key: moved(item, on_gpu) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item, on_gpu) for item in value]
    return value


def test_every_kind_is_saved_and_loaded(on_gpu, writer, at):
    state = every_kind()
    expected = plain(state)
    dcp.save(moved(state, on_gpu), checkpoint_id=at, storage_writer=writer)
    assert writer.report.device_bytes > 0
    assert_same(load(at, expected), expected)


def test_every_kind_is_loaded_directly_to_the_gpu(on_gpu, writer, at):
    expected = plain(every_kind())
    dcp.save(every_kind(), checkpoint_id=at, storage_writer=writer)
    reader = StorageReader()
    target = moved(blank(expected), on_gpu)
    dcp.load(target, checkpoint_id=at, storage_reader=reader)
    assert_same(_host(target), expected)
    assert reader.report.device_bytes > 0


def _host(value):
    if isinstance(value, list):
        return [_host(item) for item in value]
    return {k: _host(v) for k, v in value.items()} if isinstance(value, dict) else host(value)


def test_columns_of_a_larger_tensor_are_loaded(on_gpu, writer, at):
    dcp.save({"t": torch.arange(12.0).view(3, 4)}, checkpoint_id=at, storage_writer=writer)
    whole = on_gpu(torch.zeros(3, 9))
    dcp.load({"t": whole[:, 1:8:2]}, checkpoint_id=at, storage_reader=StorageReader())
    assert_same(whole[:, 1:8:2].clone(), torch.arange(12.0).view(3, 4))
    assert whole.sum() == 66


def test_another_dtype_is_converted(on_gpu, writer, at):
    dcp.save({"t": torch.arange(5.0)}, checkpoint_id=at, storage_writer=writer)
    target = on_gpu(torch.zeros(5, dtype=torch.float64))
    dcp.load({"t": target}, checkpoint_id=at, storage_reader=StorageReader())
    assert_same(target.clone(), torch.arange(5.0, dtype=torch.float64))


@pytest.mark.parametrize("which", WITH_STAGERS)
def test_changes_after_staging_are_not_saved(which, gpu, on_gpu, writer, at):
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    state = {"t": tensor, "step": 1}
    staging, upload = background(state, at, writer, STAGERS[which](writer))
    if staging is not None:
        staging.result(SECONDS)
    stream = gpu.current_stream(0)
    gpu.write(tensor, ones, stream)
    upload.result(SECONDS)
    stream.synchronize()
    expected = {"t": torch.zeros(1000), "step": 1}
    assert_same(load(at, expected), expected)


@pytest.mark.parametrize("which", WITH_STAGERS[:2])
def test_work_queued_on_the_callers_stream_is_saved(which, gpu, on_gpu, writer, at):
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    stream = gpu.Stream(0)
    with gpu.stream(stream):
        keep = gpu.write(tensor, ones, stream)
        _, upload = background({"t": tensor}, at, writer, STAGERS[which](writer))
    upload.result(SECONDS)
    assert keep is ones
    assert_same(load(at, {"t": torch.ones(1000)}), {"t": torch.ones(1000)})


@needs_async_stager
def test_streamed_save_waits_for_work_queued_at_the_call(gpu, on_gpu, writer, at):
    """The save's thread has another current stream, and reads the tensors much later."""
    tensor, ones = on_gpu(torch.zeros(1000)), on_gpu(torch.ones(1000))
    stream, planner = gpu.Stream(0), Held()
    with gpu.blocked(stream):
        with gpu.stream(stream):
            gpu.write(tensor, ones, stream)
            staging, upload = background(
                {"t": tensor}, at, writer, writer.stager(), planner=planner
            )
        planner.go_on.set()
        done, _ = concurrent.futures.wait([upload], AWHILE_S)
        assert not done
        assert not staging.done()
    upload.result(SECONDS)
    assert_same(load(at, {"t": torch.ones(1000)}), {"t": torch.ones(1000)})


@needs_async_stager
@needs_background_process
def test_streaming_from_another_process_is_refused(on_gpu, writer):
    future = writer.stager().stage({"t": on_gpu(torch.ones(3))})
    # The save, too, runs in this executor's thread; it keeps the state until it ends.
    state = future.result()
    with pytest.raises(ringstow.UnsupportedError, match="leave out async_stager"):
        writer.__getstate__()
    del state
    assert isinstance(future.exception(SECONDS), ringstow.UnsupportedError)


def in_thread(act, *args):
    """Call a function in a thread; return the thread and the list of what it raises."""
    raised = []

    def call():
        try:
            act(*args)
        except ringstow.Error as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, raised


@needs_async_stager
def test_refused_save_holds_its_tensors_until_they_are_copied(gpu, on_gpu, writer):
    """Regression: they were freed while the GPU still copied the small ones."""
    state = {"t": on_gpu(torch.ones(3))}
    with gpu.held():
        future = writer.stager().stage(state)
        del state
        thread, raised = in_thread(_writer._refuse_elsewhere, future)
        thread.join(AWHILE_S)
        gc.collect()
        assert not future.is_over()
        assert gpu.live("allocations") == 2
    thread.join(SECONDS)
    assert isinstance(raised[0], ringstow.UnsupportedError)
    assert isinstance(future.exception(SECONDS), ringstow.UnsupportedError)


@needs_async_stager
def test_failed_staging_waits_for_its_copies(gpu, on_gpu, writer):
    """Regression: as above, when a value after the tensor cannot be copied."""
    state = {"t": on_gpu(torch.ones(3)), "bad": threading.Lock()}
    with gpu.held():
        thread, raised = in_thread(writer.stager().stage, state)
        thread.join(AWHILE_S)
        gc.collect()
        assert thread.is_alive()
        assert gpu.live("allocations") == 2
    thread.join(SECONDS)
    assert isinstance(raised[0], ringstow.InvalidStateError)
    raised.clear()


@needs_async_stager
def test_staging_while_the_stream_is_captured_is_refused(gpu, on_gpu, writer):
    state, stream = {"t": on_gpu(torch.ones(3))}, gpu.Stream(0)
    with gpu.stream(stream), gpu.capturing(stream):
        for stage in (writer.stager().stage, writer.stage):
            with pytest.raises(ringstow.UnsupportedError, match="capture of a CUDA graph"):
                stage(state)


def test_snapshot_memory_is_registered_once_then_freed(gpu, on_gpu, writer):
    ringstow.release_memory()
    before = gpu.live("registered_bytes")
    state = {"a": on_gpu(torch.arange(1000.0)), "c": torch.ones(3)}
    for _ in range(2):
        staged = writer.stage(state)
        assert_same(staged["a"].clone(), torch.arange(1000.0))
        assert gpu.live("registered_bytes") == before + writer._snapshot._memory.nbytes
        del staged
    writer.close()
    assert gpu.live("registered_bytes") == before


def test_a_snapshot_of_the_cpu_registers_nothing(gpu, writer):
    before = gpu.calls("cuMemHostRegister_v2")
    writer.stage({"a": torch.ones(3)})
    assert gpu.calls("cuMemHostRegister_v2") == before


def test_tensor_across_registered_pieces_is_copied(on_gpu, writer, monkeypatch):
    """CUDA refuses a copy that touches two registrations, as the fake driver does."""
    ringstow.release_memory()
    monkeypatch.setattr(_snapshot, "_PIN", 2 << 20)
    numbers = torch.arange(6 << 20, dtype=torch.uint8)
    state = {"a": on_gpu(torch.ones(7)), "n": on_gpu(numbers), "t": on_gpu(numbers.view(2, -1)).t()}
    staged = writer.stage(state)
    assert_same(staged["n"].clone(), numbers)
    assert_same(staged["t"].clone(), numbers.view(2, -1).t().contiguous())


def test_tied_tensors_are_copied_once(gpu, on_gpu, writer):
    weight = on_gpu(torch.arange(12.0).view(3, 4))
    before = gpu.calls("cuMemcpyDtoHAsync_v2")
    staged = writer.stage({"a": weight, "p": torch.nn.Parameter(weight)})
    assert gpu.calls("cuMemcpyDtoHAsync_v2") == before + 1
    assert staged["p"].data_ptr() == staged["a"].data_ptr()
