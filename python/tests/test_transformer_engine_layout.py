"""A double with the layout of transformer_engine's Float8Tensor is saved, and filled in place.

transformer_engine installs only beside CUDA's compiler. Its classes have the protocol since
2026-08: ``__tensor_flatten__`` returns the names of the buffers that are there, and a context with
the class, a quantizer, and the other arguments of the constructor.
"""

from __future__ import annotations

import enum
import sys
import types

import pytest
import torch
from safetensors.torch import load_file

import ringstow
import ringstow.dcp
from ringstow.convert import convert

PACKAGE = "transformer_engine"
TENSORS = f"{PACKAGE}.pytorch.tensor.float8_tensor"
CONSTANTS = f"{PACKAGE}.pytorch.constants"


class DType(enum.IntEnum):
    """The dtype of the codes."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Quantizer:
    """What makes tensors of new values: no value that a file could hold."""

    group = object()


class Float8Tensor(torch.Tensor):
    """Codes, one scale for all, and perhaps the transposed codes."""

    FIELDS = (("_data", "data"), ("_transpose", "transpose"), ("_scale_inv", "fp8_scale_inv"))

    @staticmethod
    def __new__(cls, *, shape, dtype, requires_grad=False, device=None, stride=None, **kwargs):
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made.kwargs = kwargs
        for field, name in cls.FIELDS:
            setattr(made, field, kwargs[name])
        return made

    def __init__(self, **_):
        pass

    def __tensor_flatten__(self):
        tensors = [name for _, name in self.FIELDS]
        others = {key: one for key, one in self.kwargs.items() if key not in tensors}
        present = [field for field, _ in self.FIELDS if getattr(self, field) is not None]
        grad = {"is_tensor": True, "requires_grad": self.requires_grad}
        return present, {"cls": type(self), **grad, "nontensor_kwargs": others}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        kind = context["cls"]
        assert context["is_tensor"]
        fields = {name: inner.get(field) for field, name in kind.FIELDS}
        others = context["nontensor_kwargs"]
        grad = context["requires_grad"]
        outer = {"shape": size, "stride": stride, "dtype": others["fake_dtype"]}
        device = inner["_data"].device
        return kind(**outer, requires_grad=grad, device=device, **fields, **others)

    def dequantize(self, *, dtype=None):
        values = self._data.view(torch.float8_e4m3fn).float() * self._scale_inv
        return values.to(dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, call, kinds, args=(), kwargs=None):
        if call is torch.ops.aten.detach.default:
            context = {**args[0].__tensor_flatten__()[1], "requires_grad": False}
            inner = {field: getattr(args[0], field) for field, _ in cls.FIELDS}
            return cls.__tensor_unflatten__(inner, context, args[0].shape, args[0].stride())
        raise NotImplementedError(call)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Let the double be importable as the library."""
    for name in (PACKAGE, f"{PACKAGE}.pytorch", f"{PACKAGE}.pytorch.tensor", TENSORS, CONSTANTS):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for kind, name in ((Float8Tensor, TENSORS), (DType, CONSTANTS)):
        monkeypatch.setattr(kind, "__module__", name)
        monkeypatch.setattr(sys.modules[name], kind.__name__, kind, raising=False)


def made(value, quantizer=None, transpose=False):
    codes = (torch.arange(24.0).reshape(4, 6) * value).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Tensor(
        shape=(4, 6),
        dtype=torch.bfloat16,
        data=codes,
        transpose=codes.T.contiguous() if transpose else None,
        fp8_scale_inv=torch.tensor([value]),
        fp8_dtype=DType.kFloat8E4M3,
        fake_dtype=torch.bfloat16,
        quantizer=quantizer,
    )


def module_of(tensor):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(tensor)
    return module


def assert_equal(one, other):
    for field, _ in Float8Tensor.FIELDS:
        pair = getattr(one, field), getattr(other, field)
        assert pair[0] is pair[1] is None or pair[0].equal(pair[1]), field


@pytest.mark.parametrize("transpose", [False, True])
def test_its_buffers_are_saved_and_made_again_without_the_quantizer(transpose, tmp_path):
    ringstow.save({"w": made(2.0, Quantizer(), transpose)}, tmp_path / "c")
    found = ringstow.load(tmp_path / "c")["w"]
    assert type(found) is Float8Tensor
    assert (found.dtype, found.shape) == (torch.bfloat16, (4, 6))
    assert_equal(found, made(2.0, transpose=transpose))
    assert found.kwargs["fp8_dtype"] is DType.kFloat8E4M3
    assert found.kwargs["quantizer"] is None
    with ringstow.open(tmp_path / "c") as opened:
        assert {"w._data", "w._scale_inv"} <= {*opened}


@pytest.mark.parametrize("face", ["state_dict", "dcp"])
def test_a_module_s_own_tensor_is_filled_and_keeps_its_quantizer(face, tmp_path):
    module, quantizer = module_of(made(2.0, Quantizer())), Quantizer()
    other = module_of(made(1.0, quantizer))
    if face == "dcp":
        torch.distributed.checkpoint.save(
            module.state_dict(),
            checkpoint_id=tmp_path / "c",
            no_dist=True,
            storage_writer=ringstow.dcp.StorageWriter(),
        )
        torch.distributed.checkpoint.load(
            other.state_dict(),
            checkpoint_id=tmp_path / "c",
            no_dist=True,
            storage_reader=ringstow.dcp.StorageReader(),
        )
    else:
        ringstow.save({"m": module.state_dict()}, tmp_path / "c")
        ringstow.load_into({"m": other.state_dict()}, tmp_path / "c")
    assert_equal(other.weight, made(2.0))
    assert other.weight.kwargs["quantizer"] is quantizer


def test_another_format_is_refused_and_nothing_changes(tmp_path):
    one = made(2.0)
    one.kwargs["fp8_dtype"] = DType.kFloat8E5M2
    ringstow.save({"w": one}, tmp_path / "c")
    here = made(1.0)
    with pytest.raises(ringstow.KeyMismatchError, match="kFloat8E4M3.*kFloat8E5M2"):
        ringstow.load_into({"w": here}, tmp_path / "c")
    assert_equal(here, made(1.0))


def test_it_is_exported_dense(tmp_path):
    ringstow.save({"w": made(2.0, Quantizer())}, tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "hf", target="hf", dequantize=True)
    found = load_file(tmp_path / "hf" / "model.safetensors")["w"]
    assert found.equal(made(2.0).dequantize())
