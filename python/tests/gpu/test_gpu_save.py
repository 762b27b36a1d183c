"""Saves from a real GPU: the saved bytes, and the queued work that a save waits for."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support import assert_same

import ringstow
from ringstow._state.tensors import _torch

MIB = 1 << 20
SECONDS = 300
DTYPES = [getattr(torch, name) for name in _torch.CODES if hasattr(torch, name)]
CONFIG = ringstow.Config(pool_bytes=8 * MIB, block_bytes=MIB)


def layouts():
    """Return CPU tensors of every layout."""
    floats = torch.arange(24.0).view(4, 6)
    return {
        "dense": floats,
        "transposed": floats.t(),
        "columns": floats[:, 1:5],
        "every other row": floats[::2],
        "every other element": floats.view(-1)[1::2],
        "expanded": torch.arange(3.0).expand(2, 3),
        "channels last": torch.arange(48.0).view(2, 4, 3, 2).to(memory_format=torch.channels_last),
        "permuted in three": torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1),
        "0-dim": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "conjugated": torch.complex(floats, -floats).conj(),
        "negated": torch.complex(floats, -floats).conj().imag,
        "larger than the pool": torch.arange(5 * MIB),
        "larger than the pool and transposed": torch.arange(6 * MIB).view(3, 2 * MIB).t(),
    }


def on_gpu(tensor):
    """Return a tensor of the same strides on the GPU."""
    if tensor.is_conj():
        return on_gpu(tensor.conj()).conj()
    if tensor.is_neg() or tensor.numel() == 0:
        return tensor.cuda()
    storage = tensor.untyped_storage()
    held = bytearray(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
    flat = torch.frombuffer(held, dtype=torch.uint8).cuda()
    there = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return there.set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def host(value):
    """Return the state with its tensors on the CPU."""
    if isinstance(value, dict):
        return {key: host(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(dtype, tmp_path):
    tensor = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype).view(3, -1)
    there = (torch.arange(48, dtype=torch.uint8, device="cuda") % 2).view(dtype).view(3, -1)
    ringstow.save({"t": there}, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c"), {"t": tensor})
    loaded = ringstow.load(tmp_path / "c", device="cuda")
    assert loaded["t"].device == torch.device("cuda", torch.cuda.current_device())
    assert_same(host(loaded), {"t": tensor})


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_round_trips(layout, tmp_path):
    tensor = layouts()[layout]
    report = ringstow.save({"t": on_gpu(tensor)}, tmp_path / "c", config=CONFIG)
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    assert_same(ringstow.load(tmp_path / "c"), {"t": dense})
    assert report.device_bytes == tensor.numel() * tensor.element_size()
    if layout == "expanded":
        return
    target = on_gpu(tensor).zero_()
    ringstow.load_into({"t": target}, tmp_path / "c", config=CONFIG)
    assert_same(target.resolve_conj().resolve_neg().cpu().contiguous(), dense)


def test_a_state_of_both_kinds_of_memory(tmp_path):
    state = {"cpu": torch.arange(7), "gpu": torch.arange(9.0), "n": np.arange(3), "step": 4}
    weight = state["gpu"].cuda()
    report = ringstow.save({**state, "gpu": weight, "tied": weight}, tmp_path / "c")
    assert report.tensors == 3
    assert report.pinned is True, report.fallbacks
    assert report.seconds.device_copy > 0
    loaded = ringstow.load(tmp_path / "c", device="cuda")
    assert loaded["tied"].data_ptr() == loaded["gpu"].data_ptr()
    assert loaded["cpu"].is_cuda
    assert_same(host({key: loaded[key] for key in state}), state)


def test_save_waits_for_work_on_the_current_stream(busy, tmp_path):
    tensor = torch.zeros(MIB, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        tensor.fill_(1)
        handle = ringstow.save_async({"t": tensor}, tmp_path / "c")
        assert not handle.staged()  # the call did not wait
    handle.result(SECONDS)
    assert_same(ringstow.load(tmp_path / "c"), {"t": torch.ones(MIB)})


def test_work_queued_after_staging_is_not_saved(tmp_path):
    tensor = torch.zeros(4 * MIB, device="cuda")
    handle = ringstow.save_async({"t": tensor}, tmp_path / "c", config=CONFIG)
    handle.wait_staged(SECONDS)
    tensor.fill_(1)
    handle.result(SECONDS)
    assert_same(ringstow.load(tmp_path / "c"), {"t": torch.zeros(4 * MIB)})


def test_a_load_waits_for_work_on_the_current_stream(busy, tmp_path):
    ringstow.save({"t": torch.ones(MIB)}, tmp_path / "c")
    tensor = torch.zeros(MIB, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        tensor.fill_(9)
        ringstow.load_into({"t": tensor}, tmp_path / "c")
    torch.cuda.synchronize()
    assert_same(tensor.cpu(), torch.ones(MIB))


def test_tensors_dropped_after_the_call_are_saved(busy, tmp_path):
    busy()
    handle = ringstow.save_async({"t": torch.ones(4 * MIB, device="cuda")}, tmp_path / "c")
    others = [torch.zeros(4 * MIB, device="cuda") for _ in range(3)]  # torch would reuse the memory
    handle.result(SECONDS)
    assert len(others) == 3
    assert_same(ringstow.load(tmp_path / "c"), {"t": torch.ones(4 * MIB)})


def test_saves_while_a_graph_is_captured_and_while_it_replays(tmp_path):
    weights = torch.ones(16 * MIB, device="cuda")
    step = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    handle = ringstow.save_async({"w": weights}, tmp_path / "0", config=CONFIG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in the strictest mode, "global"
        step.add_(1)
    handle.result(SECONDS)
    handle = ringstow.save_async({"w": weights}, tmp_path / "1", config=CONFIG)
    for _ in range(100):
        graph.replay()
    handle.result(SECONDS)
    torch.cuda.synchronize()
    assert float(step) == 100
    for name in "01":
        assert_same(ringstow.load(tmp_path / name), {"w": torch.ones(16 * MIB)})


def test_save_within_a_capture_is_refused(tmp_path):
    tensor = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(ringstow.UnsupportedError, match="captur"):
            ringstow.save({"t": tensor}, tmp_path / "c")
    graph.replay()
    assert tensor.tolist() == [1, 1, 1]


def test_training_continues_during_a_save(tmp_path):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    handle = ringstow.save_async({"model": frozen}, tmp_path / "c", config=CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = host(frozen)
    handle.result(SECONDS)
    assert_same(ringstow.load(tmp_path / "c")["model"], expected)


def test_a_save_and_a_load_need_no_memory_on_the_gpu(growth, tmp_path):
    state = {
        "dense": torch.ones(64 * MIB, device="cuda"),
        "strided": torch.ones(4096, 8192, device="cuda").t(),
    }
    held = growth()
    ringstow.save(state, tmp_path / "c")
    ringstow.load_into(state, tmp_path / "c")
    assert growth() - held <= 64 * MIB


def test_arrays_of_the_common_protocol(tmp_path):
    class Array:
        def __init__(self, tensor):
            self.tensor = tensor
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    numbers = torch.arange(24.0, device="cuda").view(4, 6)
    ringstow.save({"a": Array(numbers), "t": Array(numbers.t())}, tmp_path / "c")
    expected = numbers.cpu().numpy()
    loaded = ringstow.load(tmp_path / "c")
    assert_same(loaded, {"a": expected, "t": np.ascontiguousarray(expected.T)})
    target = torch.zeros(6, 4, device="cuda").t()
    ringstow.load_into({"a": Array(target)}, tmp_path / "c", strict=False)
    assert_same(target.cpu().contiguous(), numbers.cpu())
