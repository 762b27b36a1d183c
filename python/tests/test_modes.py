"""Saves and loads under what changes how torch makes tensors: a default device, dispatch modes."""

import ast
import contextlib
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import ringstow
import ringstow.dcp
from ringstow.convert import convert

PACKAGE = pathlib.Path(ringstow.__file__).parent
MAKERS = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {"default device": default_device, "fake": FakeTensorMode}


def test_no_tensor_is_made_on_the_default_device():
    bare = [
        f"{file.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in MAKERS
        and ast.unparse(call.func.value) == "torch"
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not bare, "say device='cpu', or which one"


def state_of(value):
    """Return a state with tensors of several kinds: strided, small, large, of other dtypes."""
    large = torch.full((100_000,), float(value))
    return {
        "large": large,
        "strided": torch.full((30, 20), float(value)).t(),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "one": torch.tensor(value),
        "list": [torch.full((5, 1), value)],
        "step": value,
    }


def assert_is(state, value):
    for one in (*state.values(), *state["list"]):
        if isinstance(one, torch.Tensor):
            assert type(one) is torch.Tensor
            assert one.device.type == "cpu"
            assert (one == value).all()
    assert state["step"] == value


saved = state_of(4)
in_each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@in_each_mode
def test_a_save_and_a_load_are_of_real_tensors(tmp_path, mode):
    saved, target = state_of(3), state_of(0)
    with mode():
        ringstow.save(saved, tmp_path / "a")
        ringstow.save_async(saved, tmp_path / "b").result()
        ringstow.save_async(saved, tmp_path / "c", staging="snapshot").result()
        loaded = ringstow.load(tmp_path / "a")
        parts = ringstow.load(tmp_path / "b", prefix="list")
        ringstow.load_into(target, tmp_path / "c")
        with ringstow.open(tmp_path / "a") as opened:
            entry, part = opened["strided"].load(), opened["strided"][3:9, ::-2]
    assert_is(loaded, 3)
    assert_is(target, 3)
    assert (parts["list"][0] == 3).all()
    assert (entry == 3).all()
    assert part.shape == (6, 15)
    assert (part == 3).all()


@in_each_mode
def test_a_manager_saves_and_restores_real_tensors(tmp_path, mode):
    target = state_of(0)
    with mode(), ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, saved)
        manager.save_async(2, saved).result()
        restored = manager.restore(into=target)
    assert restored.step == 2
    assert_is(target, 4)


@in_each_mode
def test_what_other_programs_left_is_loaded_and_converted(tmp_path, mode):
    torch.save(saved, tmp_path / "x.pt")
    dcp.save(dict(saved), checkpoint_id=tmp_path / "stock")
    with mode():
        loaded = [ringstow.load(tmp_path / name) for name in ("x.pt", "stock")]
        convert(tmp_path / "x.pt", tmp_path / "own")
        convert(tmp_path / "own", tmp_path / "y.pt", target="torch")
        model = {name: one for name, one in saved.items() if isinstance(one, torch.Tensor)}
        ringstow.dcp.export_hf(model, tmp_path / "hf")
        loaded_model = ringstow.load(tmp_path / "hf")
    for state in (*loaded, torch.load(tmp_path / "y.pt")):
        assert_is(state, 4)
    assert (loaded_model["strided"] == 4).all()


def test_dcp_saves_and_loads_with_another_default_device(tmp_path):
    target = state_of(0)
    with default_device():
        dcp.save(saved, checkpoint_id=tmp_path / "x", storage_writer=ringstow.dcp.StorageWriter())
        dcp.load(target, checkpoint_id=tmp_path / "x", storage_reader=ringstow.dcp.StorageReader())
    assert_is(target, 4)


def test_fake_tensors_are_refused_by_name(tmp_path):
    with FakeTensorMode():
        state = {"w": torch.ones(3)}
        with pytest.raises(ringstow.UnsupportedError, match="w is a .*FakeTensor"):
            ringstow.save(state, tmp_path / "x")
