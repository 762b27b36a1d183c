"""Targets of reads: a tensor's memory, or a copy if a direct read is impossible. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ringstow._state.tensors import _cuda, _torch
from ringstow._state.tensors._memory import Address, in_elements, share_elements
from ringstow.dcp._metadata import Entry, Shape

Slice = tuple[str, int, Shape, Shape, Address, Shape]
"""A read for the native side: the name, the chunk's number, the region's offsets in it and its
lengths in elements, the address, and the strides in bytes."""


class Fill(NamedTuple):
    """A region of a stored chunk, and the tensor of the same shape that it is read into."""

    item: ReadItem
    entry: Entry
    chunk: int
    offsets: Shape
    """The region's offsets in the chunk, in torch's elements."""
    target: torch.Tensor
    dtype: torch.dtype
    """The stored dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the region, as stored."""
        return self.target.numel() * self.dtype.itemsize

    def slice_to(self, memory: torch.Tensor) -> Slice:
        """Return how to read the region into a tensor of the stored dtype, on the CPU or a GPU."""
        code = self.entry.dtype
        address, strides = _cuda.address_of(memory), _torch.strides_of(memory)
        offsets, lengths = in_elements(self.offsets, code), in_elements(tuple(memory.shape), code)
        return (self.entry.name, self.chunk, offsets, lengths, address, strides)

    def halves(self) -> list[Fill]:
        """Return the region cut in two along its slowest dimension; both halves stay compact."""
        dim = next(dim for dim, n in enumerate(self.target.shape) if n > 1)
        at = self.target.shape[dim] // 2
        first, second = self.target.tensor_split((at,), dim)
        moved = (*self.offsets[:dim], self.offsets[dim] + at, *self.offsets[dim + 1 :])
        return [self._replace(target=first), self._replace(target=second, offsets=moved)]


def split(fills: list[Fill]) -> tuple[list[Fill], list[Fill]]:
    """Return the fills that are read into their targets directly, and those that need a copy.

    No two targets of direct fills share memory.
    """
    fills = [fill for fill in fills if fill.target.numel()]
    numbers = [number for number, fill in enumerate(fills) if _is_direct(fill)]
    chosen = {number for group in _apart(fills, numbers) for number in _first_of(fills, group)}
    direct = [fill for number, fill in enumerate(fills) if number in chosen]
    copied = [fill for number, fill in enumerate(fills) if number not in chosen]
    return direct, copied


def _apart(fills: list[Fill], numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of fills in groups; targets of two groups do not overlap."""
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
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    start = tensor.data_ptr()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size()


def _first_of(fills: list[Fill], group: list[int]) -> list[int]:
    """Return the fills of a group with the same destination as its first, each region once.

    Regions of one destination never overlap, since their chunks don't. Their address ranges may
    overlap, if the regions are columns.
    """
    if len(group) == 1:
        return group
    regions = {_region(fills[number]): number for number in sorted(group, reverse=True)}
    owner = _owner(fills[min(group)])
    return [number for number in regions.values() if _owner(fills[number]) == owner]


def _owner(fill: Fill) -> tuple[object, ...]:
    index = fill.item.dest_index
    return index.fqn, index.offset, fill.target.untyped_storage().data_ptr()


def _region(fill: Fill) -> tuple[object, ...]:
    return *_owner(fill), tuple(fill.item.dest_offsets), tuple(fill.item.lengths)


def _is_direct(fill: Fill) -> bool:
    target = fill.target
    return (
        target.dtype == fill.dtype
        and type(target).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and target.layout == torch.strided
        and _torch.in_reach(target)
        and not share_elements(target.shape, target.stride())
        # Elements of half a byte have no stride in bytes.
        and (fill.entry.dtype != "F4" or target.is_contiguous())
    )


def batches(fills: list[Fill], nbytes_max: int) -> Iterator[list[Fill]]:
    """Yield fills in groups of at most this many bytes, cutting larger fills."""
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
    """Return dense host memory of the stored dtype for a fill that needs a copy."""
    # torch.set_default_device("meta") would otherwise make a tensor without memory.
    return torch.empty(fill.target.shape, dtype=fill.dtype, device="cpu")


def deliver(fill: Fill, staged: torch.Tensor) -> None:
    """Copy the bytes read into the target, converting dtype and device."""
    _torch.copy_into(fill.target, staged)
