"""Loading to a GPU: into new tensors and into existing ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from driver import AWHILE_S
from support import assert_same
from test_save import DTYPES, FLOATS, LAYOUTS, MIB

import ringstow

CONFIG = ringstow.Config(pool_bytes=2 * MIB, block_bytes=MIB // 4)


@pytest.fixture
def is_on(gpu):
    """Return a function that returns a tensor's GPU."""

    def device(tensor):
        place = gpu.place_of(tensor)
        return None if place is None else place[1]

    return device


def host(value):
    """Return the state with its tensors copied to host memory."""
    if isinstance(value, dict):
        return {key: host(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", torch.device("cuda", 0)], ids=str)
def test_tensors_come_back_on_the_device(device, is_on, at):
    state = {"a": FLOATS, "b": [torch.arange(3 * MIB), torch.tensor(1)], "n": np.arange(4), "s": 5}
    ringstow.save(state, at / "c")
    loaded = ringstow.load(at / "c", device=device, config=CONFIG)
    index = torch.device(device).index or 0
    assert is_on(loaded["a"]) == is_on(loaded["b"][0]) == is_on(loaded["b"][1]) == index
    assert_same(loaded["b"][0].clone(), state["b"][0])
    assert_same({key: loaded[key] for key in "ans"}, {key: state[key] for key in "ans"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_on_the_device(dtype, is_on, at):
    tensor = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype).view(3, -1)
    ringstow.save({"t": tensor}, at / "c")
    loaded = ringstow.load(at / "c", device="cuda")
    assert is_on(loaded["t"]) == 0
    assert_same(loaded, {"t": tensor})


def test_tied_tensors_are_tied_on_the_device(is_on, at):
    ringstow.save({"a": FLOATS, "b": FLOATS, "e": torch.empty(0, 2)}, at / "c")
    loaded = ringstow.load(at / "c", device="cuda")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["a"] is not loaded["b"]
    assert loaded["e"].shape == (0, 2)


def test_array_tied_to_a_tensor_stays_on_the_host(is_on, at):
    array = np.arange(5.0)
    ringstow.save({"t": torch.from_numpy(array), "n": array}, at / "c")
    loaded = ringstow.load(at / "c", device="cuda")
    assert is_on(loaded["t"]) == 0
    assert_same(loaded, {"t": torch.arange(5.0, dtype=torch.float64), "n": array})


def test_a_part_comes_back_on_the_device(is_on, at):
    ringstow.save({"m": {"w": FLOATS, "v": FLOATS + 1}}, at / "c")
    loaded = ringstow.load(at / "c", keys=["m.w"], device="cuda")
    assert is_on(loaded["m"]["w"]) == 0
    assert_same(loaded, {"m": {"w": FLOATS}})


def test_missing_device_is_refused_before_reading(at):
    with pytest.raises(ringstow.UnsupportedError, match="there is no device cuda:9: torch sees 2"):
        ringstow.load(at / "nothing", device="cuda:9")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_every_layout_is_filled_in_place(layout, on_gpu, at):
    source = LAYOUTS[layout]
    ringstow.save({"t": source}, at / "c")
    target = on_gpu(torch.zeros_like(source))
    before = target.data_ptr()
    report = ringstow.load_into({"t": target}, at / "c", config=CONFIG)
    assert target.data_ptr() == before
    assert_same(target.clone(), source.clone())
    assert report.device_bytes == source.numel() * source.element_size()


def test_only_the_elements_of_a_view_are_filled(gpu, on_gpu, at):
    ringstow.save({"t": torch.ones(2, 3)}, at / "c")
    whole = on_gpu(torch.zeros(4, 6))
    ringstow.load_into({"t": whole[::2, ::2]}, at / "c")
    assert whole.sum() == 6
    assert whole[::2, ::2].sum() == 6


def test_both_kinds_of_memory_and_ties_are_filled(on_gpu, at):
    state = {"a": FLOATS, "b": FLOATS, "c": FLOATS + 1, "step": 4}
    ringstow.save(state, at / "c")
    tied = on_gpu(torch.zeros(4, 6))
    into = {"a": tied, "b": tied, "c": torch.zeros(4, 6), "step": 0}
    report = ringstow.load_into(into, at / "c")
    assert_same(host(into), state)
    assert report.device_bytes == FLOATS.numel() * 4
    assert report.pinned is True


def test_conjugated_targets_are_filled(on_gpu, at):
    source = torch.tensor([1 + 2j, 3 - 1j])
    ringstow.save({"z": source}, at / "c")
    target = on_gpu(torch.zeros(2, dtype=torch.complex64)).conj()
    ringstow.load_into({"z": target}, at / "c")
    assert torch.equal(target, source)


def test_target_is_filled_after_earlier_queued_work(gpu, on_gpu, at):
    ringstow.save({"t": torch.ones(1000)}, at / "c")
    target, stale = on_gpu(torch.zeros(1000)), on_gpu(torch.full((1000,), 9.0))
    stream = gpu.Stream(0)

    def load():
        with gpu.stream(stream):
            ringstow.load_into({"t": target}, at / "c")

    with ThreadPoolExecutor(1) as thread, gpu.blocked(stream):
        gpu.write(target, stale, stream)
        loading = thread.submit(load)
        with pytest.raises(TimeoutError):
            loading.result(AWHILE_S)
    loading.result()
    assert_same(target.clone(), torch.ones(1000))


def test_autograd_notices_the_change(on_gpu, at):
    ringstow.save({"w": torch.ones(3)}, at / "c")
    w = on_gpu(torch.full((3,), 2.0)).requires_grad_()
    loss = (w * w).sum()
    ringstow.load_into({"w": w}, at / "c")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
