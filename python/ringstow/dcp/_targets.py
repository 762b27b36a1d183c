"""Where what is read goes: straight into a tensor's memory, or through a copy. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ringstow.dcp._metadata import Entry, Shape, in_elements
from ringstow.tensors import _cuda, _torch
from ringstow.tensors._memory import Address, share_elements

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
    fills = [fill for fill in fills if fill.target.numel()]
    numbers = [number for number, fill in enumerate(fills) if _is_direct(fill)]
    straight = {number for group in _apart(fills, numbers) for number in _first_of(fills, group)}
    direct = [fill for number, fill in enumerate(fills) if number in straight]
    copied = [fill for number, fill in enumerate(fills) if number not in straight]
    return direct, copied


def _apart(fills: list[Fill], numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of fills in groups whose targets lie apart from all other groups'."""
    stretches = sorted((*_stretch(fills[number].target), number) for number in numbers)
    group: list[int] = []
    reach = 0
    for start, end, number in stretches:
        if start >= reach and group:
            yield group
            group = []
        group.append(number)
        reach = max(reach, end)
    if group:
        yield group


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    start = tensor.data_ptr()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size()


def _first_of(fills: list[Fill], group: list[int]) -> list[int]:
    """Return those of a group that go to the same destination as its first, each box once.

    Boxes of one destination never overlap, as the chunks they come from don't; their stretches
    may, where they are columns.
    """
    if len(group) == 1:
        return group
    boxes = {_box(fills[number]): number for number in sorted(group, reverse=True)}
    owner = _owner(fills[min(group)])
    return [number for number in boxes.values() if _owner(fills[number]) == owner]


def _owner(fill: Fill) -> tuple[object, ...]:
    index = fill.item.dest_index
    return index.fqn, index.offset, fill.target.untyped_storage().data_ptr()


def _box(fill: Fill) -> tuple[object, ...]:
    return *_owner(fill), tuple(fill.item.dest_offsets), tuple(fill.item.lengths)


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
    # Named, as torch.set_default_device("meta") would have it elsewhere, without memory.
    return torch.empty(fill.target.shape, dtype=fill.dtype, device="cpu")


def deliver(fill: Fill, staged: torch.Tensor) -> None:
    """Copy what was read to where it belongs, across dtypes and devices."""
    _torch.copy_into(fill.target, staged)
