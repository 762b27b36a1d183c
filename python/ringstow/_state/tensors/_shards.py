"""Finds this rank's box of a sharded tensor: torch's DTensor, and FSDP1's ShardedTensor.

The layout of a DTensor is computed once for each shape, placements and mesh, without communication.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ringstow._core._errors import InvalidStateError, UnsupportedError

Shape = tuple[int, ...]

_LAYOUTS_MAX = 65536


class Piece(NamedTuple):
    """A box of a tensor that this rank has."""

    local: Any
    """torch's tensor with its elements."""
    offsets: Shape
    """Where the box begins, in torch's elements."""
    replica: tuple[int, int]
    """This rank's position among the ranks with the same elements, and their number."""


class Sharded(NamedTuple):
    """This rank's part of a tensor."""

    shape: Shape
    """Shape of the complete tensor, in torch's elements."""
    pieces: list[Piece]
    ranks: Shape | None
    """The numbers of all ranks that have a part of it; None if unknown."""


class _Layout(NamedTuple):
    """How a mesh shards a tensor, for this rank."""

    offsets: Shape | None
    """The box; None if this rank has no element."""
    replica: tuple[int, int]
    ranks: Shape


_layouts: dict[tuple[Any, ...], _Layout] = {}


def is_sharded(value: object) -> bool:
    """Return whether a value is a sharded tensor, without importing torch."""
    kind = type(value)
    return kind is _kind("torch.distributed.tensor", "DTensor") or kind is _kind(
        "torch.distributed._shard.sharded_tensor", "ShardedTensor"
    )


def sharded(value: Any, key: Callable[[], str]) -> Sharded:
    """Return this rank's part of a sharded tensor. Call it without autograd.

    Args:
        value: it.
        key: returns its name, for messages.

    Raises:
        UnsupportedError: the tensor has partial sums, or this torch does not report a shard's
            place.
        InvalidStateError: a local tensor has another shape than its layout.
    """
    if type(value).__name__ == "ShardedTensor":
        return _of_sharded_tensor(value)
    shape = tuple(value.shape)
    placements, mesh = value.placements, value.device_mesh
    # A mesh may equal one of an earlier process group, in which this rank had another number.
    asked = (shape, placements, mesh, mesh.get_rank())
    layout = _layouts.get(asked)
    if layout is None:
        if len(_layouts) >= _LAYOUTS_MAX:
            _layouts.clear()
        layout = _layouts[asked] = _layout(value, key)
    local = _local(value)
    if layout.offsets is None:
        return Sharded(shape, [], layout.ranks)
    return Sharded(shape, [Piece(local, layout.offsets, layout.replica)], layout.ranks)


def local_of(value: Any) -> Any:
    """Return this rank's part of a DTensor; None for another tensor, or outside of its mesh."""
    if type(value).__name__ != "DTensor" or value.device_mesh.get_coordinate() is None:
        return None
    return _local(value)


def _kind(module: str, name: str) -> object:
    return getattr(sys.modules.get(module), name, None)


def _local(value: Any) -> Any:
    """Return a DTensor's own elements, once the collective that computes them has ended."""
    local = value.to_local()
    # Only functional collectives return tensors with a `wait`.
    return local.wait() if hasattr(local, "wait") else local


def _layout(value: Any, key: Callable[[], str]) -> _Layout:
    mesh, placements = value.device_mesh, value.placements
    if any(one.is_partial() for one in placements):
        raise UnsupportedError(
            f"{key()} is a DTensor of partial sums ({placements}): redistribute it to Shard or "
            "Replicate first"
        )
    place = mesh.get_coordinate()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if place is None:  # this rank is not in the mesh
        return _Layout(None, (0, 1), ranks)
    if 0 in value.shape:
        places = [(at, mesh.size(dim)) for dim, at in enumerate(place)]
        return _Layout((0,) * value.dim(), _number(places), ranks)
    replicated = [
        (at, mesh.size(dim))
        for dim, (at, one) in enumerate(zip(place, placements, strict=True))
        if one.is_replicate()
    ]
    replica = _number(replicated)
    chunks = _chunks(value, key)
    if not chunks or 0 in chunks[0].sizes:
        return _Layout(None, replica, ranks)
    (chunk,) = chunks
    if tuple(chunk.sizes) != tuple(_local(value).shape):
        raise InvalidStateError(
            f"{key()} has {list(_local(value).shape)} here, and its layout says {list(chunk.sizes)}"
        )
    return _Layout(tuple(chunk.offsets), replica, ranks)


def _chunks(value: Any, key: Callable[[], str]) -> list[Any]:
    """Return the boxes that this rank has of a DTensor, by the protocol of DCP's planner."""
    ask = getattr(value, "__create_chunk_list__", None)
    if ask is None:
        raise UnsupportedError(f"{key()} is a DTensor, and this torch does not tell where it is")
    # torch computes the offsets with tensors on the default device, which may hold no numbers.
    with sys.modules["torch"].device("cpu"):
        chunks: list[Any] = ask()
    return chunks


def _number(places: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the index of a place in a grid, and the number of places."""
    number = 0
    for at, count in places:
        number = number * count + at
    return number, math.prod(count for _, count in places)


def _of_sharded_tensor(value: Any) -> Sharded:
    pieces = [
        Piece(shard.tensor, tuple(shard.metadata.shard_offsets), (0, 1))
        for shard in value.local_shards()
        if shard.tensor.numel()
    ]
    return Sharded(tuple(value.metadata().size), pieces, None)


def dtensor_like(like: Any, local: Any) -> Any:
    """Return a DTensor over a local tensor, sharded as another is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
