"""Tensors of every dtype, layout and kind of the installed torch, and the faces that save them."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import ringstow
import ringstow.dcp
import ringstow.distributed
from ringstow.convert import convert

# torch warns of these kinds when they are made, not when they are saved.
WARNINGS = (
    "Sparse",
    "BComplex32",
    "ComplexHalf",
    "The PyTorch API of nested tensors",
    "The PyTorch API of MaskedTensors",
)


@ringstow.allow_types
class Scaled(torch.Tensor):
    """A tensor of codes with one scale a row, such as an int8 weight, and a context."""

    @staticmethod
    def __new__(cls, codes, scale, bits=8):
        shape = codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)

    def __init__(self, codes, scale, bits=8):
        self.codes, self.scale, self.bits = codes, scale, bits

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"bits": self.bits, "dtype": self.scale.dtype, "at": (1, None)}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(inner["codes"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        one = args[0]
        if call in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(one.codes.detach(), one.scale.detach(), one.bits)
        if call is torch.ops.aten.clone.default:
            return cls(one.codes.clone(), one.scale.clone(), one.bits)
        if call is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(call)


def scaled(value=3):
    codes = torch.full((4, 6), value, dtype=torch.int8)
    return Scaled(codes, torch.full((4, 1), value / 2))


class Forgotten(Scaled):
    """A type that no program has allowed."""


def _bits(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    count = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    raw = torch.randint(0, 255, (count,), dtype=torch.uint8, generator=generator)
    return (raw.bool() if dtype is torch.bool else raw.view(dtype)).reshape(shape)


def _sparse():
    dense = torch.arange(24.0).reshape(4, 6) * (torch.arange(24).reshape(4, 6) % 3 == 0)
    twice = torch.tensor([[0, 2, 0], [1, 3, 1]])
    hybrid = torch.sparse_coo_tensor(twice, torch.arange(6.0).reshape(3, 2), (3, 5, 2))
    return {
        "sparse COO": dense.to_sparse,
        "sparse COO, not coalesced, with a dense dimension": lambda: hybrid,
        "sparse COO that requires grad": lambda: dense.to_sparse().requires_grad_(),
        "sparse COO without elements": lambda: torch.zeros(3, 2).to_sparse(),
        "sparse CSR": dense.to_sparse_csr,
        "sparse CSC": dense.to_sparse_csc,
        "sparse BSR": lambda: dense.to_sparse_bsr((2, 2)),
        "sparse BSC": lambda: dense.to_sparse_bsc((2, 2)),
    }


def _jagged():
    rows = [torch.arange(6.0).reshape(2, 3), torch.arange(15.0).reshape(5, 3)]
    one = torch.nested.nested_tensor(rows, layout=torch.jagged)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 2])
    holes = functools.partial(torch.nested.narrow, torch.arange(36.0).reshape(2, 6, 3), 1, starts)
    return {
        "jagged": lambda: one,
        "jagged, transposed": lambda: one.transpose(1, 2),
        "jagged with holes": lambda: holes(lengths, layout=torch.jagged),
        "jagged that requires grad": lambda: one.detach().requires_grad_(),
    }


def _hooked():
    one = torch.ones(3, requires_grad=True)
    one.register_hook(print)
    return one


DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
QUANTIZED = [one for one in DTYPES if str(one).startswith(("torch.qu", "torch.qi"))]
KINDS = {
    **{
        str(dtype).removeprefix("torch."): functools.partial(_bits, (4, 8), dtype)
        for dtype in DTYPES
        if dtype not in QUANTIZED
    },
    "no elements": lambda: torch.ones(0, 3),
    "no dimensions": lambda: torch.tensor(2.5),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "conjugated": lambda: torch.complex(torch.ones(3), torch.ones(3)).conj(),
    "negated": lambda: torch.complex(torch.ones(3), torch.ones(3)).conj().imag,
    "with a hook": _hooked,
    "Parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    **_sparse(),
    **_jagged(),
    "wrapper": scaled,
    "wrapper of wrappers": lambda: TwoTensor(
        TwoTensor(torch.ones(2), torch.zeros(2)), TwoTensor(torch.zeros(2), torch.ones(2))
    ),
    "Parameter of a wrapper": lambda: torch.nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2))),
}


def _quantized():
    return torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8)


def _fake():
    with FakeTensorMode():
        return torch.ones(2)


def _functional():
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(2))


REFUSED = {
    "wrapper of a type that is not allowed": (
        lambda: Forgotten(torch.ones(1, 1), torch.ones(1, 1)),
        "ringstow.allow_types(Forgotten)",
    ),
    "quantized (qint8 and others)": (_quantized, "int_repr"),
    "nested, strided": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "unbind"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "to_dense"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "computes its elements",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "materialize"),
    "fake": (_fake, "computes its elements"),
    "functional": (_functional, "computes its elements"),
    "lazy parameter": (lambda: torch.nn.LazyLinear(2).weight, "run the lazy module"),
}


# Faces: each saves a state of tensors, and returns what it loads; `into` is to be filled.


def by_save(state, into, path):
    ringstow.save(state, path)
    return ringstow.load(path)


def by_save_async(state, into, path):
    ringstow.save_async(state, path).result()
    return ringstow.load(path)


def by_mapped_load(state, into, path):
    ringstow.save(state, path)
    return ringstow.load(path, mmap=True)


def by_load_into(state, into, path):
    ringstow.save(state, path)
    ringstow.load_into(into, path)
    return into


def by_open(state, into, path):
    ringstow.save(state, path)
    with ringstow.open(path) as checkpoint:
        return {name: checkpoint.tree[name].load() for name in state}


def by_ranks(state, into, path):
    ringstow.distributed.save(state, path)
    ringstow.distributed.load_into(into, path)
    return into


def by_convert(state, into, path):
    ringstow.save(state, path)
    convert(path, f"{path}-2", target="ringstow")
    return ringstow.load(f"{path}-2")


def by_dcp(state, into, path):
    dcp.save(state, checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter())
    dcp.load(into, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())
    return into


def by_dcp_planners(state, into, path):
    saver, loader = ringstow.dcp.SavePlanner(), ringstow.dcp.LoadPlanner()
    writer, reader = ringstow.dcp.StorageWriter(), ringstow.dcp.StorageReader()
    dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=saver)
    dcp.load(into, checkpoint_id=path, storage_reader=reader, planner=loader)
    return into


def by_dcp_async(state, into, path):
    writer = ringstow.dcp.StorageWriter()
    dcp.async_save(state, checkpoint_id=path, storage_writer=writer).result()
    return ringstow.load(path)


FACES = {
    "save, load": by_save,
    "save_async": by_save_async,
    "mapped load": by_mapped_load,
    "load_into": by_load_into,
    "open": by_open,
    "distributed": by_ranks,
    "convert": by_convert,
    "DCP": by_dcp,
    "DCP, our planners": by_dcp_planners,
    "DCP async": by_dcp_async,
}
NEW = ("save, load", "save_async", "mapped load", "open", "convert", "DCP async")
"""Faces that make new tensors, and so know whether they require grad."""


def inner(tensor):
    """Return a tensor's type or layout, what else makes it, and its plain tensors by name."""
    grad = tensor.requires_grad
    if tensor.is_nested:
        lengths = {} if tensor.lengths() is None else {"lengths": tensor.lengths()}
        made = {"values": tensor.values(), "offsets": tensor.offsets(), **lengths}
        return "jagged", (grad, tensor.__tensor_flatten__()[1]), made
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return type(tensor), (grad, context), {name: getattr(tensor, name) for name in names}
    if tensor.layout is torch.sparse_coo:
        made = {"indices": tensor._indices(), "values": tensor._values()}
        return tensor.layout, (grad, tensor.shape, tensor.is_coalesced()), made
    if tensor.layout is not torch.strided:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        first = tensor.crow_indices() if rows else tensor.ccol_indices()
        second = tensor.col_indices() if rows else tensor.row_indices()
        made = {"first": first, "second": second, "values": tensor.values()}
        return tensor.layout, (grad, tensor.shape), made
    return None


def assert_equal(found, wanted, *, grad=True):
    """Compare two tensors bit by bit, of any kind; plain ones load without their gradient."""
    one, other = inner(found), inner(wanted)
    assert (one is None) == (other is None), (type(found), type(wanted))
    if one is None:
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        raw = [t.detach().resolve_conj().resolve_neg().reshape(-1) for t in (found, wanted)]
        assert raw[0].view(torch.uint8).equal(raw[1].view(torch.uint8))
        return
    assert one[0] == other[0]
    assert one[1][1:] == other[1][1:] or "jagged" in one
    assert not grad or one[1][0] == other[1][0]
    assert one[2].keys() == other[2].keys()
    for name, tensor in one[2].items():
        assert_equal(tensor, other[2][name])


def blank(tensor):
    """Return a tensor of the same kind with other elements, to be filled."""
    if type(tensor) is Scaled:
        return scaled(0)
    if type(tensor) is TwoTensor:
        return TwoTensor(blank(tensor.a), blank(tensor.b))
    if tensor.layout is torch.strided and not tensor.is_nested:
        count = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").numel()
        zeros = torch.zeros(count * tensor.dtype.itemsize, dtype=torch.uint8)
        return zeros.view(tensor.dtype).reshape(tensor.shape)
    return tensor.detach() * 0


def check(face, kinds, path):
    """Save these kinds by a face, load them, and compare."""
    state = {name: KINDS[name]() for name in kinds}
    found = FACES[face](state, {name: blank(one) for name, one in state.items()}, path)
    for name, wanted in state.items():
        assert_equal(found[name], wanted, grad=face in NEW)


def error_of(face, make, path):
    """Return the error that a face raises when it saves a tensor; None if it saves it."""
    with contextlib.suppress(StopIteration):
        try:
            FACES[face]({"model": {"x": make()}}, {}, path)
        except BaseException as error:  # DCP's is one
            return error
    return None
