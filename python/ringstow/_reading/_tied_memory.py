"""Targets that share memory, such as tied weights, filled from tensors that do not share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringstow._reading._mapped_tensors import Opened
from ringstow._state.tensors._memory import Stored, Target, place_at
from ringstow._state.tree._walk import Leaf, Path, flat_name

# Bytes compared at once.
_PIECE = 16 << 20


class Fill(NamedTuple):
    """A tensor or array of the state dict, and the stored tensor to fill it with."""

    target: Target
    leaf: Leaf
    stored: Stored
    cast: bool
    """Whether to convert the stored elements to another dtype."""
    path: Path
    """The target's path in the state dict."""


def differing(checkpoint: Opened, fills: list[Fill]) -> Iterator[str]:
    """Yield a sentence for each two fills of one tensor here with tensors that differ.

    The shared memory could hold only one of the two. Equal tensors are read twice.
    """
    first: dict[tuple[object, ...], Fill] = {}
    for fill in fills:
        target = fill.target
        known = first.setdefault((place_at(target.address), target.shape, target.strides), fill)
        if known.leaf.body != fill.leaf.body and not _are_equal(checkpoint, known, fill):
            names = " and ".join(flat_name(each.path) for each in (known, fill))
            yield f"{names} are one tensor here and two that differ in the checkpoint"


def _are_equal(checkpoint: Opened, one: Fill, other: Fill) -> bool:
    if one.stored != other.stored and (one.cast or other.cast):
        return False
    blocks, _ = checkpoint.load([one.leaf.body, other.leaf.body])
    a, b = memoryview(blocks[0]), memoryview(blocks[1])
    if a.nbytes != b.nbytes:
        return False
    starts = range(0, a.nbytes, _PIECE)
    return all(bytes(a[at : at + _PIECE]) == bytes(b[at : at + _PIECE]) for at in starts)
