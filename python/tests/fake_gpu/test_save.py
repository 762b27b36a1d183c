"""GPU tensors are saved like CPU tensors: every dtype, every layout, each once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import assert_same

import ringstow
from ringstow._state.tensors import _torch

MIB = 1 << 20
DTYPES = [getattr(torch, name) for name in _torch.CODES if hasattr(torch, name)]
FLOATS = torch.arange(24.0).view(4, 6)

LAYOUTS = {
    "dense": FLOATS,
    "transposed": FLOATS.t(),
    "a column": FLOATS[:, 2:3],
    "columns": FLOATS[:, 1:5],
    "every other row": FLOATS[::2],
    "every other element": FLOATS.view(-1)[1::2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "channels last": torch.arange(48.0)
    .view(2, 4, 3, 2)
    .contiguous(memory_format=torch.channels_last),
    "permuted in three": torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1),
    "with an offset": torch.arange(9.0)[5:],
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "larger than the pool": torch.arange(3 * MIB, dtype=torch.int32),
    "larger than the pool and transposed": torch.arange(3 * MIB).view(3, MIB).t(),
}


def saved(state, path, **options):
    config = ringstow.Config(pool_bytes=2 * MIB, block_bytes=MIB // 4)
    report = ringstow.save(state, path, config=config, **options)
    return report, ringstow.load(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, on_gpu, at):
    tensor = torch.arange(48, dtype=torch.uint8).view(torch.uint8)
    tensor = tensor % 2 if dtype == torch.bool else tensor
    tensor = tensor.view(dtype).view(3, -1)
    _, loaded = saved({"t": on_gpu(tensor)}, at / "c")
    assert_same(loaded, {"t": tensor})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, on_gpu, at):
    _, loaded = saved({"t": on_gpu(LAYOUTS[layout])}, at / "c")
    assert_same(loaded, {"t": LAYOUTS[layout].contiguous()})


def test_conjugated_and_negated_views(on_gpu, at):
    numbers = torch.complex(FLOATS, -FLOATS)
    there = on_gpu(numbers)
    _, loaded = saved({"conj": there.conj(), "neg": there.conj().imag}, at / "c")
    assert_same(loaded, {"conj": numbers.conj(), "neg": numbers.conj().imag})


def test_shared_memory_is_stored_once(on_gpu, at):
    weight = on_gpu(FLOATS)
    state = {"a": weight, "b": {"c": weight}, "p": torch.nn.Parameter(weight), "row": weight[1]}
    report, loaded = saved(state, at / "c")
    assert report.tensors == 2
    assert loaded["a"].data_ptr() == loaded["b"]["c"].data_ptr() == loaded["p"].data_ptr()
    assert_same(loaded["row"], FLOATS[1])


def test_equal_tensors_on_two_devices_are_stored_twice(on_gpu, at):
    report, loaded = saved({"a": on_gpu(FLOATS), "b": FLOATS}, at / "c")
    assert report.tensors == 2
    assert_same(loaded, {"a": FLOATS, "b": FLOATS})


def test_a_state_of_both_kinds_of_memory(on_gpu, at):
    state = {
        "gpu": {f"layer{n}": torch.full((1000 + n,), float(n)) for n in range(20)},
        "cpu": torch.arange(7),
        "array": np.arange(5),
        "step": 3,
    }
    there = {**state, "gpu": {name: on_gpu(tensor) for name, tensor in state["gpu"].items()}}
    report, loaded = saved(there, at / "c")
    assert_same(loaded, state)
    assert report.device_bytes == sum(4 * len(tensor) for tensor in state["gpu"].values())


def test_report_counts_bytes_from_gpus(on_gpu, at):
    report, _ = saved({"t": on_gpu(FLOATS)}, at / "c")
    assert report.device_bytes == FLOATS.numel() * 4
    assert report.pinned is True
    assert report.seconds.device_copy > 0
    assert "pinned memory" in str(report)
    assert report.fallbacks == () or all(f.kind != "pinned_memory" for f in report.fallbacks)


def test_report_of_a_cpu_save_mentions_no_gpu(at):
    report, _ = saved({"t": FLOATS}, at / "c")
    assert (report.device_bytes, report.pinned) == (0, None)
    assert "GPU" not in str(report)


def test_two_gpus(on_gpu, at):
    state = {"a": on_gpu(FLOATS, 0), "b": on_gpu(FLOATS + 1, 1)}
    report, loaded = saved(state, at / "c")
    assert_same(loaded, {"a": FLOATS, "b": FLOATS + 1})
    assert report.device_bytes == 2 * FLOATS.numel() * 4


def test_nothing_is_allocated_on_the_gpu(gpu, on_gpu, at):
    tensor = on_gpu(LAYOUTS["larger than the pool and transposed"])
    before = gpu.live("allocated_bytes")
    saved({"t": tensor}, at / "c")
    assert gpu.peak("allocated_bytes") <= before + 64 * MIB


def test_no_copy_is_on_the_default_stream(gpu, on_gpu, at):
    tensor = on_gpu(FLOATS)
    before = gpu.calls("default-stream-copies")
    ringstow.save({"t": tensor}, at / "c")
    assert gpu.calls("default-stream-copies") == before


def test_captured_stream_is_refused(gpu, on_gpu, at):
    tensor, stream = on_gpu(FLOATS), gpu.Stream(0)
    refused = pytest.raises(ringstow.UnsupportedError, match="captur")
    with gpu.stream(stream), gpu.capturing(stream), refused:
        ringstow.save({"t": tensor}, at / "c")
    assert not (at / "c" / "manifest.json").exists()
    ringstow.save({"t": tensor}, at / "c")


def test_four_bit_numbers(on_gpu, at):
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("torch without 4-bit numbers")
    bits = torch.arange(24, dtype=torch.uint8).view(4, 6)
    _, loaded = saved({"t": on_gpu(bits).view(dtype)}, at / "c")
    assert_same(loaded, {"t": bits.view(dtype)})
