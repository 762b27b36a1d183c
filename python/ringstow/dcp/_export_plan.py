"""Which rank writes which bytes of a model's files, and which bytes ranks send each other. Pure.

Every rank computes this from the same list of boxes: the regions of tensors that the ranks hold.

The files are cut into units: runs of complete pages. One rank writes a unit, so no two ranks write
to one page, and no rank reads another rank's writes. A segment is a run of file bytes that one rank
holds in order; a unit begins at the first page boundary in a segment. The writer of a unit holds
its first byte. Other ranks send their bytes of the unit: a few bytes where shards follow each
other, and most of the unit where a tensor is sharded along an inner dimension.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringstow._state.tensors._memory import overlap

Shape = tuple[int, ...]

PAGE = 4096
UNIT_BYTES = 8 << 20
"""A unit has at most this many bytes plus one page."""
ROUND_BYTES = 32 << 20
"""About how many bytes a rank receives, and sends, at once."""


class Box(NamedTuple):
    """A region of a tensor, in elements."""

    offsets: Shape
    sizes: Shape

    def elements(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes; None if it is empty."""
        met = overlap(*self, *other)
        return None if met is None else Box(*met)


@dataclasses.dataclass
class Tensor:
    """A tensor of the model, as all ranks know it."""

    name: str
    shape: Shape
    item_bytes: int
    boxes: dict[Box, list[int]]
    """The boxes with elements, which tile the tensor, and the ranks that hold each, in order."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes


class Piece(NamedTuple):
    """Bytes of one tensor in a unit, and the ranks that have them."""

    file: int
    offset: int
    """In the file."""
    tensor: int
    first: int
    """The first of its elements, in row-major order."""
    length: int
    """Elements."""
    sources: tuple[tuple[Box, int], ...]
    """The boxes that hold some of these elements, and the rank that provides each."""


class Unit(NamedTuple):
    """A run of pages of one file that one rank writes."""

    writer: int
    round: int
    """The round in which its bytes are sent, from 1; 0 if the writer has them all in file order."""
    pieces: list[Piece]


def runs(shape: Shape, first: int, count: int) -> Iterator[Box]:
    """Yield boxes that make up a range of elements, in row-major order."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    end = first + count
    while first < end:
        at, within = divmod(first, row)
        rows = (end - first) // row
        if within == 0 and rows:
            yield Box((at, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
            first += rows * row
        else:
            part = min(end - first, row - within)
            for box in runs(shape[1:], within, part):
                yield Box((at, *box.offsets), (1, *box.sizes))
            first += part


def first_element(shape: Shape, box: Box) -> int | None:
    """Return where a box begins in row-major order; None if it is not contiguous there."""
    at = 0
    may_split = True
    for n, offset, size in zip(shape, *box, strict=True):
        at = at * n + offset
        if size != n and not may_split:
            return None
        may_split = may_split and size == 1
    return at


class _Segment(NamedTuple):
    begin: int
    end: int
    """In the file."""
    tensor: int
    first: int
    """Its first element."""
    box: Box | None
    """The box of the segment; None for a whole tensor whose boxes are not in file order."""


class Shares:
    """The units of all files, in order."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        files: Sequence[tuple[int, int]],
        places: Sequence[tuple[int, int]],
        ranks: int,
    ) -> None:
        """Assign the units to ranks.

        Args:
            tensors: the tensors of the model.
            files: for each file, the bytes of its header and its length.
            places: for each tensor, its file and the offset of its first byte there.
            ranks: the number of ranks.
        """
        self._tensors = tensors
        self._files = files
        self._of_file: list[list[int]] = [[] for _ in files]
        for number, (file, _) in enumerate(places):
            if tensors[number].nbytes:
                self._of_file[file].append(number)
        for numbers in self._of_file:
            numbers.sort(key=lambda number: places[number][1])
        self._places = places
        self._load = [0] * ranks
        self._rows: dict[int, _Rows] = {}
        # Bytes by rank in the current round.
        self._in: dict[int, int] = {}
        self._out: dict[int, int] = {}
        self._round = 1
        self._turn = 0

    def units(self) -> Iterator[Unit]:
        """Yield all units, in the order of the files. Call it once."""
        for file, (header, length) in enumerate(self._files):
            segments = list(self._segments(file))
            cuts = sorted(
                {cut for segment in segments for cut in _cuts(segment, length)} | {length}
            )
            assert cuts[0] in (header, length)
            at, writer = 0, None
            for begin, end in itertools.pairwise(cuts):
                while segments[at].end <= begin:
                    at += 1
                writer = self._writer(segments[at], begin, end, writer)
                self._load[writer] += end - begin
                yield self._unit(file, writer, segments, at, begin, end)

    def _segments(self, file: int) -> Iterator[_Segment]:
        for number in self._of_file[file]:
            tensor, (_, begin) = self._tensors[number], self._places[number]
            starts = {box: first_element(tensor.shape, box) for box in tensor.boxes}
            if any(start is None for start in starts.values()):
                yield _Segment(begin, begin + tensor.nbytes, number, 0, None)
                continue
            for box, first in sorted(starts.items(), key=lambda item: item[1] or 0):
                assert first is not None
                at = begin + first * tensor.item_bytes
                yield _Segment(at, at + box.elements() * tensor.item_bytes, number, first, box)

    def _writer(self, segment: _Segment, begin: int, end: int, last: int | None) -> int:
        """Return the writer of a unit: the previous writer if it is not too far ahead."""
        holders = self._holders(segment, begin, end)
        least = min(holders, key=lambda rank: (self._load[rank], rank))
        if last in holders and last is not None:
            return last if self._load[last] <= self._load[least] + UNIT_BYTES else least
        return least

    def _holders(self, segment: _Segment, begin: int, end: int) -> list[int]:
        tensor = self._tensors[segment.tensor]
        if segment.box is not None:
            return tensor.boxes[segment.box]
        first = (begin - segment.begin) // tensor.item_bytes
        last = (min(end, segment.end) - segment.begin) // tensor.item_bytes
        boxes = self._rows_of(segment.tensor).between(first, last)
        return sorted({rank for box in boxes for rank in tensor.boxes[box]})

    def _unit(
        self, file: int, writer: int, segments: list[_Segment], at: int, begin: int, end: int
    ) -> Unit:
        pieces, received = [], 0
        sent: dict[int, int] = {}
        while at < len(segments) and segments[at].begin < end:
            segment = segments[at]
            start, stop = max(begin, segment.begin), min(end, segment.end)
            tensor = self._tensors[segment.tensor]
            first = segment.first + (start - segment.begin) // tensor.item_bytes
            count = (stop - start) // tensor.item_bytes
            sources = self._sources(segment, tensor, writer, first, count)
            pieces.append(Piece(file, start, segment.tensor, first, count, sources))
            if segment.box is None or sources[0][1] != writer:
                received += stop - start
                every = sum(box.elements() for box, _ in sources)
                for box, rank in sources:  # about the share that it has of these rows
                    share = box.elements() * (stop - start) // every
                    sent[rank] = sent.get(rank, 0) + share
            at += 1
        return Unit(writer, self._next_round(writer, received, sent) if received else 0, pieces)

    def _sources(
        self, segment: _Segment, tensor: Tensor, writer: int, first: int, count: int
    ) -> tuple[tuple[Box, int], ...]:
        boxes = (
            [segment.box]
            if segment.box is not None
            else self._rows_of(segment.tensor).between(first, first + count)
        )
        self._turn += 1

        def provider(box: Box) -> int:
            holders = tensor.boxes[box]
            return writer if writer in holders else holders[self._turn % len(holders)]

        return tuple((box, provider(box)) for box in boxes)

    def _rows_of(self, number: int) -> _Rows:
        rows = self._rows.get(number)
        if rows is None:  # only for tensors whose boxes are not in file order
            rows = self._rows[number] = _Rows(self._tensors[number])
        return rows

    def _next_round(self, writer: int, received: int, sent: dict[int, int]) -> int:
        is_full = self._in.get(writer, 0) + received > ROUND_BYTES or any(
            self._out.get(rank, 0) + nbytes > ROUND_BYTES for rank, nbytes in sent.items()
        )
        if is_full and self._in:
            self._round += 1
            self._in, self._out = {}, {}
        self._in[writer] = self._in.get(writer, 0) + received
        for rank, nbytes in sent.items():
            self._out[rank] = self._out.get(rank, 0) + nbytes
        return self._round


def _cuts(segment: _Segment, length: int) -> Iterator[int]:
    """Yield where units begin in a segment."""
    begin = -(-segment.begin // PAGE) * PAGE
    yield from range(min(begin, length), max(segment.end, begin + 1), UNIT_BYTES)


class _Rows:
    """Finds the boxes of a tensor that hold some of a range of elements."""

    def __init__(self, tensor: Tensor) -> None:
        self._row = math.prod(tensor.shape[1:])
        self._by_row: dict[tuple[int, int], list[Box]] = {}
        for box in tensor.boxes:
            key = (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.offsets else (0, 1)
            self._by_row.setdefault(key, []).append(box)
        self._keys = sorted(self._by_row)
        self._tallest = max(end - begin for begin, end in self._keys)

    def between(self, first: int, end: int) -> list[Box]:
        """Return the boxes in the rows of these elements."""
        top, bottom = first // self._row, (end - 1) // self._row
        at = bisect.bisect_left(self._keys, (top - self._tallest, 0))
        found: list[Box] = []
        for key in itertools.islice(self._keys, at, None):
            if key[0] > bottom:
                break
            if key[1] > top:
                found += self._by_row[key]
        return found
