"""The regions to read for an index such as ``[3, :10, ::-2]`` of a tensor. Pure."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringstow._state.tensors._memory import dense_strides, overlap

# Read skipped elements, too, if the next selected element is at most this many bytes away.
_NEAR_BYTES = 8192
# Maximum number of regions in one read.
_REGIONS_MAX = 100_000

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths, one per dimension."""


class Range(NamedTuple):
    """The selected elements of a dimension: ``start``, ``start + step``, ..."""

    start: int
    size: int
    step: int = 1
    """The distance between selected elements, 1 or more."""
    flipped: bool = False
    """Whether to return them in reverse order."""

    @property
    def span(self) -> int:
        """Length from the first selected element to the last, in elements."""
        return (self.size - 1) * self.step + 1


class Selection(NamedTuple):
    """The elements that an index selects."""

    ranges: tuple[Range, ...]
    """One range per dimension of the tensor."""
    shape: tuple[int, ...]
    """The shape of the result."""


class Piece(NamedTuple):
    """A region of the tensor, and where to store its first element."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    at: int
    """Offset in the memory, in bytes."""


class Reading(NamedTuple):
    """How to read a selection: into dense memory of a shape, from which elements are picked."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element of a region to the next; negative in a reversed dimension."""
    regions: tuple[Piece, ...]
    keep: tuple[slice, ...]
    """The index that picks the selected elements from that memory."""


def select(index: Any, shape: Sequence[int], name: str) -> Selection:
    """Return the selection of an index, by numpy's rules for integers, slices, ``...`` and None.

    Raises:
        IndexError: there are too many indices, or one is out of bounds.
        TypeError: the index is anything else, such as a mask or a list of indices.
        ValueError: a slice has a step of 0.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not ... for item in items)
    if used > len(shape):
        raise IndexError(f"{name} has {len(shape)} dimensions, and {used} indices were given")
    dots = [at for at, item in enumerate(items) if item is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have one '...'")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - used)
    ranges: list[Range] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        size = shape[len(ranges)]
        if isinstance(item, slice):
            ranges.append(_of_slice(item, size))
            result.append(ranges[-1].size)
        else:
            ranges.append(Range(_of_integer(item, size, len(ranges), name), 1))
    return Selection(tuple(ranges), tuple(result))


def _of_slice(item: slice, size: int) -> Range:
    start, stop, step = item.indices(size)
    count = len(range(start, stop, step))
    if step < 0 < count:
        return Range(start + (count - 1) * step, count, -step, flipped=True)
    return Range(start, count, step if count > 1 and step > 0 else 1)


def _of_integer(item: Any, size: int, dimension: int, name: str) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        number = operator.index(item)
    except TypeError:
        raise TypeError(
            f"{name} takes integers, slices, ... and None as indices, not {type(item).__name__}; "
            "for masks and lists of indices, load() it and index the result"
        ) from None
    if not -size <= number < size:
        raise IndexError(
            f"index {number} is out of bounds for dimension {dimension} of {name}, of size {size}"
        )
    return number % size


def plan(ranges: Sequence[Range], shape: Sequence[int], item_bytes: int) -> Reading:
    """Return how to read ranges of a tensor that have at least one element.

    Elements that a step skips are not read, unless the gap is less than about a page.
    """
    apart = _apart(ranges, shape, item_bytes)
    kept = [r.size if split else r.span for r, split in zip(ranges, apart, strict=True)]
    steps = dense_strides(kept, item_bytes)
    start = sum((n - 1) * s for n, s, r in zip(kept, steps, ranges, strict=True) if r.flipped)
    strides = tuple(-s if r.flipped else s for s, r in zip(steps, ranges, strict=True))
    segments = [
        [(r.start + i * r.step, 1, i) for i in range(r.size)] if split else [(r.start, r.span, 0)]
        for r, split in zip(ranges, apart, strict=True)
    ]
    regions = tuple(
        Piece(
            tuple(offset for offset, _, _ in region),
            tuple(length for _, length, _ in region),
            start + sum(i * step for (_, _, i), step in zip(region, strides, strict=True)),
        )
        for region in itertools.product(*segments)
    )
    keep = tuple(slice(None, None, 1 if s else r.step) for r, s in zip(ranges, apart, strict=True))
    return Reading(tuple(kept), strides, regions, keep)


def _apart(ranges: Sequence[Range], shape: Sequence[int], item_bytes: int) -> list[bool]:
    """Return for each range whether to read its elements one by one."""
    apart = []
    regions = 1
    for dimension, wanted in enumerate(ranges):
        row = item_bytes * math.prod(shape[dimension + 1 :])
        split = wanted.step > 1 and wanted.step * row >= _NEAR_BYTES
        split = split and regions * wanted.size <= _REGIONS_MAX
        regions *= wanted.size if split else 1
        apart.append(split)
    return apart


def in_chunks(
    reading: Reading, chunks: Sequence[Region]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
    """Yield the part of the regions in each chunk of the tensor.

    Yields:
        The number of the chunk, offsets in it, lengths, and the offset in the memory, in bytes, for
        the first element.
    """
    for region in reading.regions:
        for number, (begin, sizes) in enumerate(chunks):
            met = overlap(region.offsets, region.lengths, begin, sizes)
            if met is None:
                continue
            start, lengths = met
            moves = zip(start, region.offsets, reading.strides, strict=True)
            at = region.at + sum((s - o) * step for s, o, step in moves)
            yield number, tuple(s - b for s, b in zip(start, begin, strict=True)), lengths, at
