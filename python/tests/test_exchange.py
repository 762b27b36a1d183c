"""The fast path for usual tensors agrees with the general path, which handles all others."""

import datetime
import warnings

import numpy as np
import pytest
import torch
from support import assert_same, codec, raising

from ringstow import InvalidStateError, _native
from ringstow._state.tensors import _cuda, _torch

USUAL = [name for name in _torch.CODES if hasattr(torch, name)]
for unusual in ("float4_e2m1fn_x2", "complex32", "complex64", "complex128"):
    if unusual in USUAL:
        USUAL.remove(unusual)

has_exchange = pytest.mark.skipif(
    _torch.usual().exchange is None, reason="this torch has no exchange API"
)


def find(tensor):
    return _torch.usual().exchange.find(tensor, _cuda.finder())


def general(tensor):
    memory = _torch.memory_of(tensor, "t")
    return memory.dtype, memory.shape, memory.address


@has_exchange
@pytest.mark.parametrize(
    "make",
    [
        *(lambda name=name: torch.empty(2, 3, dtype=getattr(torch, name)) for name in USUAL),
        lambda: torch.tensor(1.0),
        lambda: torch.empty(0, 4),
        lambda: torch.arange(10)[3:5],
        lambda: torch.ones(1, 3).t(),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.ones(2, requires_grad=True) * 2,
        lambda: torch.inference_mode()(torch.ones)(2),
        lambda: torch.from_numpy(np.arange(3)),
    ],
)
def test_fast_path_takes_every_usual_dtype_and_dense_tensors(make):
    tensor = make()
    assert find(tensor) == general(tensor)


def freed(offset):
    view = torch.ones(10)[offset:]
    view.untyped_storage().resize_(0)
    return view


def cut_short():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(20)
    return tensor


@has_exchange
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3).t(),
        lambda: torch.ones(1).expand(3),
        lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.tensor([1 + 2j]).conj().imag,
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.quint8),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint32),
        lambda: torch._neg_view(torch.ones(2)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nn.LazyLinear(2).weight,
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch.empty(4, dtype=torch.uint1),
        lambda: torch.empty(4, dtype=torch.int7),
        lambda: freed(0),
        lambda: freed(4),
        cut_short,
        lambda: torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
        lambda: np.ones(2),
        lambda: None,
    ],
)
def test_other_tensors_go_to_the_general_path(make):
    assert find(make()) is None


@has_exchange
def test_transformed_tensor_goes_to_the_general_path():
    seen = []

    def look(tensor):
        seen.append(find(tensor))
        return tensor

    torch.vmap(look)(torch.ones(2, 3))
    assert seen == [None]


@has_exchange
def test_host_tensor_needs_no_address_lookup():
    no_stream = raising(AssertionError("a tensor in host memory needs no stream"))
    tensor = torch.ones(2)
    assert _torch.usual().exchange.find(tensor, no_stream)[2] == tensor.data_ptr()


def test_foreign_capsule_is_refused():
    class Impostor:
        __dlpack_c_exchange_api__ = datetime.datetime_CAPI

    with pytest.raises(ValueError, match="name"):
        _native.Exchange.of([Impostor], [])
    assert _native.Exchange.of([int], []) is _native.Exchange.of([], []) is None  # they have none


def test_torch_without_exchange_api_saves_the_same(monkeypatch):
    monkeypatch.setattr(_torch, "usual", lambda: _torch.Usual((), None))
    weight = torch.arange(6.0).view(2, 3)
    state = {"a": weight, "tied": [weight], "b": weight.t(), "e": torch.empty(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = codec(state)
    assert_same(back, state)
    assert back["a"].data_ptr() == back["tied"][0].data_ptr()


def test_native_tensors_deduplicate_memory_and_names():
    one, two = torch.ones(2), torch.ones(2)
    tensors = _native.Tensors(taken={"__metadata__"})
    assert tensors.add("a", _torch.memory_of(one, "a")) == "a"
    assert tensors.add("a", _torch.memory_of(two, "a")) == "a#2"
    assert tensors.add("b", _torch.memory_of(one, "b")) == "a"
    assert tensors.add("__metadata__", _torch.memory_of(torch.ones(2), "m")) == "__metadata__#2"
    assert [spec[0] for spec in tensors] == ["a", "a#2", "__metadata__#2"]
    assert len(tensors) == 3


@pytest.mark.parametrize(
    ("dtype", "nbytes", "match"), [("F33", 8, "no dtype"), ("F32", 9, "9 bytes are not what")]
)
def test_invalid_tensor_description_is_refused(dtype, nbytes, match):
    with pytest.raises(InvalidStateError, match=match):
        _native.Tensors().add("a", (dtype, (2,), None, 4096, nbytes, None))
