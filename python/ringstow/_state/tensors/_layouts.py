"""Tensors that functions of torch or of bitsandbytes make of others, by the names of their layouts.

Each `Layout` takes such a tensor apart, makes it again, and fills one in place. It checks what a
checkpoint says before torch uses it as addresses.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow._state.tensors import _bitsandbytes

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(eq=False)
class TensorParts:
    """The parts of a tensor that is made of others, if it is loaded as its parts.

    Attributes:
        type: its type, ``"torchao.quantization:Int8Tensor"``, or its layout, ``"sparse_coo"``.
        tensors: the inner tensors by name, also as `TensorParts` if they have parts themselves.
        context: the other values that the type needs; None if they need types that are missing
            here.
    """

    type: str
    tensors: dict[str, Any]
    context: dict[str, Any] | None


def grad(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the part of a context that says whether a tensor needs a gradient."""
    return {"requires_grad": True} if tensor.requires_grad else {}


Differs = tuple[str, ...]
"""What a tensor is here and in the checkpoint; empty if the first can be filled from the second."""


def _parts_differ(here: TensorParts, there: TensorParts) -> Differs:
    ours, theirs = (
        {name: list(part.shape) for name, part in one.tensors.items()} for one in (here, there)
    )
    return () if ours == theirs else (f"parts of {ours}", f"parts of {theirs}")


def _fill_parts(target: TensorParts, source: TensorParts, _: Any, __: Any) -> None:
    for name, part in target.tensors.items():
        part.copy_(source.tensors[name])


class Layout(NamedTuple):
    """One kind of tensors that are made of others."""

    take: Callable[[Any, str, str], TensorParts | None]
    """Takes a tensor, the name of its layout, and its key for messages."""
    make: Callable[[str, dict[str, Any], dict[str, Any]], Any]
    tensors: frozenset[str]
    """The names of the inner tensors that it always has."""
    optional: frozenset[str]
    context: frozenset[str]
    more: frozenset[str] = frozenset()
    """Further keys that the context may have."""
    differs: Callable[[TensorParts, TensorParts], Differs] = _parts_differ
    fill: Callable[[TensorParts, TensorParts, Any, Any], None] = _fill_parts
    """Copies the elements of one tensor into another: takes the parts of both, and both."""
    is_view: bool = False
    """Whether its inner tensor is a view of it, so that a load can fill that."""

    def fits(self, tensors: dict[str, Any], context: dict[str, Any]) -> bool:
        """Return whether these are the parts of such a tensor, by their names."""
        return (
            self.tensors <= tensors.keys() <= self.tensors | self.optional
            and self.context <= context.keys() <= self.context | self.more | {"requires_grad"}
        )


def _of_values(here: TensorParts, there: TensorParts) -> Differs:
    values = [list(one.tensors["values"].shape) for one in (here, there)]
    return f"a {here.type} tensor with values {values[0]}", f"one with values {values[1]}"


def _take_coo(tensor: Any, name: str, _: str) -> TensorParts:
    plain = tensor.detach()
    tensors = {"indices": plain._indices(), "values": plain._values()}
    context = {"shape": list(plain.shape), "coalesced": plain.is_coalesced()}
    return TensorParts(name, tensors, context | grad(tensor))


def _make_coo(_: str, tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    torch = sys.modules["torch"]
    return torch.sparse_coo_tensor(
        tensors["indices"],
        tensors["values"],
        context["shape"],
        is_coalesced=context["coalesced"],
        check_invariants=True,  # indices outside the shape would be addresses outside its memory
    )


def _coo_differs(here: TensorParts, there: TensorParts) -> Differs:
    assert here.context is not None
    assert there.context is not None
    if here.context["coalesced"] and not there.context["coalesced"]:
        return "a coalesced sparse_coo tensor", "one that is not coalesced"
    return _of_values(here, there) if _parts_differ(here, there) else ()


def _fill_coo(here: TensorParts, there: TensorParts, target: Any, source: Any) -> None:
    _fill_parts(here, there, target, source)
    target._coalesced_(source.is_coalesced())


_BY_ROWS = ("sparse_csr", "sparse_bsr")


def _take_compressed(tensor: Any, name: str, _: str) -> TensorParts:
    plain = tensor.detach()
    first, second = (
        (plain.crow_indices(), plain.col_indices())
        if name in _BY_ROWS
        else (plain.ccol_indices(), plain.row_indices())
    )
    tensors = {"compressed_indices": first, "plain_indices": second, "values": plain.values()}
    return TensorParts(name, tensors, {"shape": list(plain.shape)} | grad(tensor))


def _make_compressed(name: str, tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    torch = sys.modules["torch"]
    return torch.sparse_compressed_tensor(
        tensors["compressed_indices"],
        tensors["plain_indices"],
        tensors["values"],
        context["shape"],
        layout=getattr(torch, name),
        check_invariants=True,
    )


def _compressed_differs(here: TensorParts, there: TensorParts) -> Differs:
    if not _parts_differ(here, there):
        return ()
    growing = (here.tensors[name] for name in ("values", "plain_indices"))
    can_grow = all(one.untyped_storage().resizable() for one in growing)
    is_alike = _block_shape(here.tensors) == _block_shape(there.tensors)
    return () if can_grow and is_alike else _of_values(here, there)


def _block_shape(parts: dict[str, Any]) -> list[int]:
    """Return the shape of a compressed tensor's values without their number."""
    shape, batch = list(parts["values"].shape), parts["compressed_indices"].dim() - 1
    return shape[:batch] + shape[batch + 1 :]


def _fill_compressed(_: TensorParts, __: TensorParts, target: Any, source: Any) -> None:
    source = source.to(target.device)
    target.resize_as_sparse_(source)
    target.copy_(source)


def _take_jagged(tensor: Any, name: str, _: str) -> TensorParts:
    plain = tensor.detach()
    names, context = plain.__tensor_flatten__()
    tensors = {"values": plain.values(), "offsets": plain.offsets()}
    if plain.lengths() is not None:
        tensors["lengths"] = plain.lengths()
    lengths = {  # cached, as the size of an empty tensor
        bound: getattr(plain, f"_{bound}_tensor").shape[0] if f"_{bound}_tensor" in names else None
        for bound in ("min_seqlen", "max_seqlen")
    }
    context = {"dim": context["ragged_idx"], **lengths}
    return TensorParts(name, tensors, context | grad(tensor))


def _make_jagged(_: str, tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    torch = sys.modules["torch"]
    values, offsets, lengths = tensors["values"], tensors["offsets"], tensors.get("lengths")
    _check_ragged(values, offsets, lengths, context["dim"])
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets,
        lengths,
        jagged_dim=context["dim"],
        min_seqlen=context["min_seqlen"],
        max_seqlen=context["max_seqlen"],
    )


def _check_ragged(values: Any, offsets: Any, lengths: Any, dim: int) -> None:
    """Refuse rows outside the values: torch does not check them."""
    ends = offsets[1:] if lengths is None else offsets[: lengths.numel()] + lengths
    starts = offsets[:-1] if lengths is None else offsets[: lengths.numel()]
    if not 0 < dim <= values.dim():
        raise ValueError("its ragged dimension is none of its values'")
    rows = values.shape[dim - 1]
    if not ((starts >= 0).all() and (ends >= starts).all() and (ends <= rows).all()):
        raise ValueError("its offsets are outside its values")


def _jagged_differs(here: TensorParts, there: TensorParts) -> Differs:
    ours, theirs = here.tensors, there.tensors
    fixed = (ours.keys() | theirs.keys()) - {"values"}
    same = all(
        one in ours and one in theirs and ours[one].cpu().equal(theirs[one].cpu()) for one in fixed
    )
    if same and ours["values"].shape == theirs["values"].shape:
        return ()
    lengths = [_lengths(one) for one in (ours, theirs)]
    return f"a jagged tensor of the lengths {lengths[0]}", f"one of {lengths[1]}"


def _lengths(parts: dict[str, Any]) -> str:
    lengths = parts.get("lengths")
    lengths = parts["offsets"].diff() if lengths is None else lengths
    return f"{lengths.tolist()!r:.60}"


def _fill_jagged(here: TensorParts, there: TensorParts, _: Any, __: Any) -> None:
    here.tensors["values"].copy_(there.tensors["values"])


def take_bits(tensor: torch.Tensor) -> TensorParts | None:
    """Return a tensor of a dtype without a name in safetensors as the integers of its bits."""
    module = sys.modules["torch"]
    bits = _BITS.get(tensor.dtype.itemsize)
    if bits is None or not hasattr(module, bits):
        return None
    plain = tensor.detach().view(getattr(module, bits))
    return TensorParts("bits", {"bits": plain}, {"dtype": tensor.dtype})


_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def _make_bits(_: str, tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    return tensors["bits"].view(context["dtype"])


def _of_taken(name: str, taken: _bitsandbytes.Taken | None, tensor: Any) -> TensorParts | None:
    return None if taken is None else TensorParts(name, taken[0], taken[1] | grad(tensor))


_COMPRESSED = Layout(
    _take_compressed,
    _make_compressed,
    frozenset({"compressed_indices", "plain_indices", "values"}),
    frozenset(),
    frozenset({"shape"}),
    differs=_compressed_differs,
    fill=_fill_compressed,
)
LAYOUTS = {
    "sparse_coo": Layout(
        _take_coo,
        _make_coo,
        frozenset({"indices", "values"}),
        frozenset(),
        frozenset({"shape", "coalesced"}),
        differs=_coo_differs,
        fill=_fill_coo,
    ),
    **dict.fromkeys((*_BY_ROWS, "sparse_csc", "sparse_bsc"), _COMPRESSED),
    "jagged": Layout(
        _take_jagged,
        _make_jagged,
        frozenset({"values", "offsets"}),
        frozenset({"lengths"}),
        frozenset({"dim", "min_seqlen", "max_seqlen"}),
        differs=_jagged_differs,
        fill=_fill_jagged,
    ),
    "bits": Layout(
        lambda tensor, *_: take_bits(tensor),
        _make_bits,
        frozenset({"bits"}),
        frozenset(),
        frozenset({"dtype"}),
        is_view=True,
    ),
    _bitsandbytes.PARAMS_4BIT: Layout(
        lambda tensor, name, key: _of_taken(name, _bitsandbytes.take_4bit(tensor, key), tensor),
        lambda _, tensors, context: _bitsandbytes.make_4bit(tensors, context),
        frozenset({"data", "absmax", "quant_map"}),
        frozenset({"nested_absmax", "nested_quant_map", "nested_offset"}),
        frozenset({"quant_type", "blocksize", "dtype", "shape"}),
        frozenset({"nested_blocksize", "nested_dtype"}),
    ),
    _bitsandbytes.PARAMS_8BIT: Layout(
        lambda tensor, name, key: _of_taken(name, _bitsandbytes.take_8bit(tensor, key), tensor),
        lambda _, tensors, context: _bitsandbytes.make_8bit(tensors, context),
        frozenset({"data", "SCB"}),
        frozenset(),
        frozenset({"has_fp16_weights"}),
    ),
}
"""The composites that are no types, by the name of their layout."""
