"""Where what is read goes: straight into a tensor's memory, or through a copy. Does no I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ringstow import _cuda, _torch
from ringstow._memory import Address, share_elements
from ringstow.dcp._metadata import Entry, Shape, in_elements

Slice = tuple[str, int, Shape, Shape, Address, Shape]
"""The native side's: name, chunk's number, offsets in it, lengths, address, strides in bytes."""


class Fill(NamedTuple):
    """A box of a stored chunk, and the tensor of the same shape that it goes to."""

    item: ReadItem
    entry: Entry
    chunk: int
    offsets: Shape
    """Of the box in the chunk, in torch's elements."""
    target: torch.Tensor
    dtype: torch.dtype
    """As stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box, as stored."""
        return self.target.numel() * self.dtype.itemsize

    def slice_to(self, memory: torch.Tensor) -> Slice:
        """Return the box on its way into a tensor of the stored dtype, on the CPU or a GPU."""
        code = self.entry.dtype
        address, strides = _cuda.address_of(memory), _torch.strides_of(memory)
        offsets, lengths = in_elements(self.offsets, code), in_elements(tuple(memory.shape), code)
        return (self.entry.name, self.chunk, offsets, lengths, address, strides)

    def halves(self) -> list[Fill]:
        """Return the box cut in two, so that the two are no wider apart on disk than need be."""
        dim = next(dim for dim, n in enumerate(self.target.shape) if n > 1)
        at = self.target.shape[dim] // 2
        first, second = self.target.tensor_split((at,), dim)
        moved = (*self.offsets[:dim], self.offsets[dim] + at, *self.offsets[dim + 1 :])
        return [self._replace(target=first), self._replace(target=second, offsets=moved)]


def split(fills: list[Fill]) -> tuple[list[Fill], list[Fill]]:
    """Return what can be read straight into place, and what has to be copied there.

    What is read straight shares no memory with anything else that is read straight.
    """
    direct: list[Fill] = []
    copied: list[Fill] = []
    taken = _Taken()
    for fill in fills:
        if fill.target.numel() == 0:
            continue
        (direct if _is_direct(fill) and taken.take(fill) else copied).append(fill)
    return direct, copied


def _is_direct(fill: Fill) -> bool:
    target = fill.target
    return (
        target.dtype == fill.dtype
        and type(target).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and target.layout == torch.strided
        and _torch.in_reach(target)
        and not share_elements(target.shape, target.stride())
        # Half a byte an element has no stride in bytes.
        and (fill.entry.dtype != "F4" or target.is_contiguous())
    )


class _Taken:
    """The memory that is spoken for: stretches, each of one destination tensor.

    Boxes of one destination never overlap, as the chunks they come from don't; their stretches
    may, where they are columns.
    """

    def __init__(self) -> None:
        self._owner_at: dict[int, object] = {}
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._boxes: set[object] = set()

    def take(self, fill: Fill) -> bool:
        """Take the memory of a fill's target; returns False if it is not free."""
        target, item = fill.target, fill.item
        storage = target.untyped_storage()
        owner = (item.dest_index.fqn, item.dest_index.offset, storage.data_ptr())
        box = (owner, tuple(item.dest_offsets), tuple(item.lengths))
        if box in self._boxes:
            return False
        start = target.data_ptr()
        span = sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
        if not self._extend(owner, start, start + (span + 1) * target.element_size()):
            return False
        self._boxes.add(box)
        return True

    def _extend(self, owner: object, start: int, end: int) -> bool:
        """Add a stretch, merged with the owner's own that it touches."""
        first = bisect.bisect_right(self._starts, start)
        if first and self._ends[self._starts[first - 1]] > start:
            first -= 1
        last = bisect.bisect_left(self._starts, end)
        met = self._starts[first:last]
        if any(self._owner_at[at] != owner for at in met):
            return False
        for at in met:
            start, end = min(start, at), max(end, self._ends.pop(at))
            del self._owner_at[at]
        self._starts[first:last] = [start]
        self._owner_at[start], self._ends[start] = owner, end
        return True


def batches(fills: list[Fill], nbytes_max: int) -> Iterator[list[Fill]]:
    """Yield fills in groups of at most so many bytes; larger ones are cut up."""
    batch: list[Fill] = []
    room = nbytes_max
    queue = fills[::-1]
    while queue:
        fill = queue.pop()
        if fill.nbytes > nbytes_max and fill.target.numel() > 1:
            queue.extend(reversed(fill.halves()))
            continue
        if fill.nbytes > room and batch:
            yield batch
            batch, room = [], nbytes_max
        batch.append(fill)
        room -= fill.nbytes
    if batch:
        yield batch


def staging_for(fill: Fill) -> torch.Tensor:
    """Return dense host memory of the stored dtype for a fill that has to be copied."""
    return torch.empty(fill.target.shape, dtype=fill.dtype)


def deliver(fill: Fill, staged: torch.Tensor) -> None:
    """Copy what was read to where it belongs, across dtypes and devices."""
    _torch.copy_into(fill.target, staged)
