"""Saved states load equal: every dtype in every shape, and real models with optimizers."""

import copy
import pathlib

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from support import assert_same, missing, python, shards_of
from test_state import FLOAT4, TORCH_DTYPES, values

import ringstow
from ringstow._state.tensors import _torch

pytestmark = pytest.mark.torch_seam


def filled(shape, dtype):
    """Return a tensor of any dtype with varying, valid bytes."""
    tensor = torch.empty(shape, dtype=dtype)
    count = tensor.numel() * tensor.element_size()
    data = torch.arange(count) % (2 if dtype == torch.bool else 251)
    if count:
        tensor.view(-1).view(torch.uint8).copy_(data.to(torch.uint8))
    return tensor


def shapes_of(dtype):
    """Return tensors of one dtype in every memory layout."""
    weight = filled((4, 6), dtype)
    state = {
        "dense": weight,
        "empty": filled((0, 3), dtype),
        "strided": filled((6, 8), dtype)[::2, 1::3],
        "expanded": filled((1, 6), dtype).expand(5, 6),
        "transposed": filled((3, 4), dtype).t(),
        "permuted": filled((2, 3, 4), dtype).permute(1, 2, 0),
        "tied": weight,
        "slice": filled((100,), dtype)[7:20],
    }
    if dtype != FLOAT4:
        state["scalar"] = filled((), dtype)
    if dtype.is_floating_point and weight.element_size() > 1:
        state["parameter"] = torch.nn.Parameter(filled((3,), dtype))
    return state


def plain(state):
    return {k: v.data if isinstance(v, torch.nn.Parameter) else v for k, v in state.items()}


@pytest.mark.parametrize("fast", [True, False], ids=["natively", "by torch"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_in_every_shape(dtype, fast, tmp_path, monkeypatch):
    if not fast:
        monkeypatch.setattr(_torch, "maker", lambda: None)
    state = shapes_of(dtype)
    report = ringstow.save(state, tmp_path / "c")
    back = ringstow.load(tmp_path / "c")
    assert_same(back, plain(state))
    assert report.tensors == len(state) - 1  # tied
    assert back["dense"].untyped_storage()._cdata == back["tied"].untyped_storage()._cdata


@given(state=values.map(lambda v: {"v": v}))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_state_comes_back_equal(state, tmp_path):
    ringstow.save(state, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c"), state)


def trained(seed=0):
    """Return a small transformer and its optimizer after a few real steps."""
    torch.manual_seed(seed)
    model = torch.nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 5, 32), torch.randn(2, 4, 32)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_loaded_tensors_can_be_trained(tmp_path):
    ringstow.save({"w": torch.ones(3)}, tmp_path / "c")
    w = ringstow.load(tmp_path / "c")["w"].requires_grad_()
    (w * w).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]
    torch.optim.SGD([w], lr=1.0).step()
    assert w.tolist() == [-1, -1, -1]
    copy.deepcopy(w)


NO_BYTES = [{}, {"a": {}}, {"a": []}, {"a": torch.empty(0)}, {"a": 1}]
NAMES = ["", "a/b", "..", "é", "日本語", "\U0001f600", 'q"\\', "\n\0", "#2", "x" * 9999]


@pytest.mark.parametrize(
    "state",
    [*NO_BYTES, *({name: torch.ones(2), "other": {name: torch.zeros(1)}} for name in NAMES)],
)
def test_states_without_bytes_and_any_names_of_tensors_come_back(state, tmp_path):
    ringstow.save(state, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c"), state)
    assert ringstow.verify(tmp_path / "c").ok


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_the_safetensors_library_sees_the_same_tensors(dtype, tmp_path):
    if dtype in (torch.complex32, torch.complex128):
        pytest.skip("safetensors has no such dtype")
    state = shapes_of(dtype)
    ringstow.save(state, tmp_path / "c")
    seen = {}
    for shard in shards_of(tmp_path / "c"):
        try:
            with safetensors.safe_open(shard, framework="pt") as file:
                seen |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except AttributeError as error:
            pytest.skip(f"the safetensors library can't give this dtype to torch: {error}")
    del state["tied"]
    assert_same(dict(sorted(seen.items())), dict(sorted(plain(state).items())))


def test_data_section_and_tensors_are_aligned(tmp_path):
    state = {f"{dtype}-{n}": filled((n,), dtype) for dtype in TORCH_DTYPES for n in (1, 3, 1000)}
    ringstow.save(state, tmp_path / "c")
    for shard in shards_of(tmp_path / "c"):
        data = shard.read_bytes()
        header = int.from_bytes(data[:8], "little")
        assert (8 + header) % 4096 == 0
    for name, tensor in ringstow.load(tmp_path / "c").items():
        assert tensor.data_ptr() % tensor.element_size() == 0, name


@pytest.mark.parametrize("engine", ["uring", "portable"])
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("pool", [16 << 10, 64 << 10, 1 << 20])
def test_every_engine_and_pool_size_gives_the_same(engine, direct, pool, tmp_path):
    config = ringstow.Config(engine=engine, direct=direct, pool_bytes=pool, block_bytes=8192)
    state = {"a": torch.randn(100_003), "b": torch.randn(77, 31).t(), "c": torch.tensor(1)}
    try:
        report = ringstow.save(state, tmp_path / "c", config=config)
    except ringstow.UnsupportedError as error:
        missing(str(error))
    assert report.engine == engine
    assert_same(ringstow.load(tmp_path / "c", config=config), state)
    assert ringstow.verify(tmp_path / "c", config=config).ok


def test_shards_stay_below_shard_bytes(tmp_path):
    config = ringstow.Config(shard_bytes=1 << 20)
    state = {str(i): torch.randn(50_000) for i in range(20)}
    report = ringstow.save(state, tmp_path / "c", config=config)
    sizes = [shard.stat().st_size for shard in shards_of(tmp_path / "c")]
    assert len(sizes) == report.files > 1
    assert max(sizes) <= (1 << 20) + 8192
    assert_same(ringstow.load(tmp_path / "c"), state)


def test_relative_paths_do_not_move_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handle = ringstow.save_async({"a": torch.ones(1)}, "c")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    handle.result()
    assert ringstow.load(pathlib.Path("..") / "c")["a"].tolist() == [1]


def test_numpy_alone_needs_no_torch(tmp_path):
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
import numpy as np, ringstow
ringstow.save({"a": np.arange(3), "s": np.float32(2), "n": [1, (2,)]}, sys.argv[1])
back = ringstow.load(sys.argv[1])
assert back["a"].tolist() == [0, 1, 2] and back["s"] == 2, back
assert ringstow.load_into({"a": np.zeros(3, int), "s": 0, "n": 0}, sys.argv[1]).tensor_bytes == 24
"""
    python(code, tmp_path / "c", check=True)
