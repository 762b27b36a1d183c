"""Where the inner tensors of a sharded composite are: DTensors of quantized and other wrappers.

A DTensor of a wrapper has a wrapper of its own on each rank. The checkpoint has one wrapper, as if
one process had the whole tensor, so each inner tensor needs a place in the whole inner tensor. That
is known for inner tensors that have the shape of their wrapper, and for those that `_KINDS` lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors import _composites, _shards, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import dense_strides
from ringstow._state.tensors._shards import Piece, Shape, Sharded

Kind = Literal["rows", "flat", "common"]

# How dimension 0 of inner tensors follows that of their wrapper, by their names: the same rows; a
# share of elements that is the same for each row; or the same tensor on all ranks.
_ROWS: dict[str, Kind] = {"scale": "rows", "zero_point": "rows"}
_KINDS: dict[str, dict[str, Kind]] = {
    "torchao.optim.subclass_8bit:OptimState8bit": {"scale": "flat", "qmap": "common"},
    "torchao.optim.subclass_4bit:OptimState4bit": {
        "codes": "flat",
        "scale": "flat",
        "qmap": "common",
    },
    "torchao.optim.subclass_fp8:OptimStateFp8": {"scale": "flat"},
    "torchao.prototype.quantized_training.int8:Int8QuantizedTrainingLinearWeight": _ROWS,
    "torchao.quantization:Int8Tensor": _ROWS,
    "torchao.quantization:Float8Tensor": _ROWS,
    "torchao.quantization:IntxUnpackedToInt8Tensor": _ROWS,
}
# The index of the shape in contexts that have it.
_SHAPES = {"torchao.optim.subclass_4bit:OptimState4bit": 1}


class Inner(NamedTuple):
    """An inner tensor of a sharded composite, as a sharded tensor by itself."""

    shape: Shape
    """Shape of the whole inner tensor, in torch's elements."""
    pieces: list[Piece]


class Whole(NamedTuple):
    """A sharded composite, as if one process had the whole tensor."""

    parts: TensorParts
    """The type, this rank's inner tensors, and the context of the whole tensor."""
    inner: dict[str, Inner]
    ranks: Shape | None
    """The numbers of all ranks that have a part of it."""


def may_be_whole(sharded: Sharded, plain: tuple[type, ...]) -> bool:
    """Return, quickly, whether `whole_of` may find a composite; ``plain`` are torch's classes."""
    return not sharded.pieces or type(sharded.pieces[0].local) not in plain


def whole_of(value: Any, sharded: Sharded, key: Callable[[], str]) -> Whole | None:
    """Return a sharded tensor as a composite; None if this rank's part of it is a plain tensor.

    Call it without autograd.

    Args:
        value: the tensor.
        sharded: what `_shards.sharded` returns of it.
        key: returns its name, for messages.

    Raises:
        UnsupportedError: the place of an inner tensor is unknown.
    """
    shape, pieces, ranks = sharded
    local = _shards.local_of(value)
    parts = None if local is None else _composites.take(local, key())
    if parts is None:
        return None
    found = {name: Inner((), []) for name in parts.tensors}
    for piece in pieces:
        for name, tensor in parts.tensors.items():
            if not _torch.is_tensor(tensor) or _composites.is_composite(tensor):
                raise _unknown(parts.type, name, key)
            sizes = (shape, tuple(local.shape), piece.offsets)
            place = _place(parts.type, name, tuple(tensor.shape), sizes)
            if place is None:
                raise _unknown(parts.type, name, key)
            found[name] = Inner(place[0], [Piece(tensor, place[1], piece.replica)])
    context = _with_shape(parts, shape)
    if value.requires_grad:
        context["requires_grad"] = True
    return Whole(TensorParts(parts.type, parts.tensors, context), found, ranks)


def _unknown(kind: str, name: str, key: Callable[[], str]) -> UnsupportedError:
    return UnsupportedError(
        f"{key()} is a DTensor of a {kind.replace(':', '.')}, of which ringstow does not know how "
        f"its inner tensor {name!r} is sharded: save .full_tensor() of it on one rank, or "
        ".to_local() of each rank in a PerRank"
    )


_Sizes = tuple[Shape, Shape, Shape]
"""Shape of the whole wrapper, of this rank's part of it, and the part's offsets."""


def _place(kind: str, name: str, inner: Shape, sizes: _Sizes) -> tuple[Shape, Shape] | None:
    """Return the whole shape and the offsets of an inner tensor; None if they are unknown."""
    shape, local, offsets = sizes
    how = _KINDS.get(kind, {}).get(name)
    if shape == local or how == "common":
        return inner, (0,) * len(inner)
    if how is None and inner == local:
        return shape, offsets
    if how is None or shape[1:] != local[1:] or not inner:
        return None
    rows, rest = inner[0], (0,) * (len(inner) - 1)
    if how == "rows" and rows != local[0]:
        return None
    whole, at = rows * shape[0], rows * offsets[0]
    if whole % local[0] or at % local[0]:
        return None
    return (whole // local[0], *inner[1:]), (at // local[0], *rest)


def local_like(
    parameter: Any,
    kind: str,
    stored: dict[str, tuple[Any, Shape]],
    context: dict[str, Any],
    key: str,
) -> Any:
    """Return a new DTensor of a wrapper, sharded as a parameter is, with elements to be filled.

    Args:
        parameter: a DTensor.
        kind: the wrapper's type.
        stored: dtype and whole shape of each inner tensor, in torch's elements.
        context: the context of the whole wrapper.
        key: its name, for messages.

    Raises:
        UnsupportedError: the place of an inner tensor is unknown, or a block of elements that has
            one scale would be on two ranks.
    """
    import torch

    mine = parameter.to_local()
    shape, local = tuple(parameter.shape), tuple(mine.shape)
    if context.get("shape") != list(shape):
        raise UnsupportedError(
            f"{key} has the shape {context.get('shape')} in the checkpoint, and its parameter has "
            f"{list(shape)}"
        )
    tensors = {}
    for name, (dtype, whole) in stored.items():
        inner = _local_shape(kind, name, whole, (shape, local))
        if inner is None:
            raise UnsupportedError(
                f"{key} is a {kind.replace(':', '.')}, whose inner tensor {name!r} can't be cut "
                f"into {list(local)} of {list(shape)}: load it on a number of ranks that cuts no "
                "block of elements, such as that of the save"
            )
        tensors[name] = torch.empty(inner, dtype=dtype, device=mine.device)
    parts = TensorParts(kind, tensors, context)
    made = _composites.make(TensorParts(kind, tensors, _with_shape(parts, local)), key)
    return _shards.dtensor_like(parameter, made)


def _local_shape(kind: str, name: str, whole: Shape, sizes: tuple[Shape, Shape]) -> Shape | None:
    shape, local = sizes
    how = _KINDS.get(kind, {}).get(name)
    if shape == local or how == "common":
        return whole
    if how is None and whole == shape:
        return local
    if how is None or shape[1:] != local[1:] or not whole or whole[0] * local[0] % shape[0]:
        return None
    return (whole[0] * local[0] // shape[0], *whole[1:])


def _with_shape(parts: TensorParts, shape: Shape) -> dict[str, Any]:
    """Return the context of a composite of the same kind with another shape."""
    import torch

    context = {**(parts.context or {}), "shape": list(shape)}
    context["stride"] = list(dense_strides(shape, 1)) if math.prod(shape) else [1] * len(shape)
    at = _SHAPES.get(parts.type)
    if at is not None:
        context["context"] = [*context["context"]]
        context["context"][at] = torch.Size(shape)
    return context
