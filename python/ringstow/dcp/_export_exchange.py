"""Sends the bytes of tensors to the rank that writes them: cut, cast, send and assemble.

Elements are sent as integers of the same size: back ends support few dtypes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringstow._ranks._team import Team
from ringstow._state.tensors._memory import Placed
from ringstow.dcp._export_plan import Box, Piece, Shape, runs

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Cast(NamedTuple):
    """A rank's part of a tensor, and the tensor's dtype in the file."""

    box: Box
    local: torch.Tensor | Callable[[], torch.Tensor]
    """The elements, or what makes them."""
    dtype: torch.dtype

    def words(self, region: Box) -> torch.Tensor:
        """Return the elements of a region of the tensor, in order, as integers of their size."""
        part = self.local if isinstance(self.local, torch.Tensor) else self.local()
        for dim, (at, start, size) in enumerate(
            zip(region.offsets, self.box.offsets, region.sizes, strict=True)
        ):
            part = part.narrow(dim, at - start, size)
        # Integers from here on: torch cannot copy some dtypes.
        return part.to(self.dtype).view(_WORDS[self.dtype.itemsize]).contiguous().view(-1)

    def run(self, first: int, count: int) -> torch.Tensor:
        """Return elements of the rank's part, in row-major order, as integers of their size."""
        here = runs(self.box.sizes, first, count)
        parts = [self.words(_moved(region, self.box.offsets)) for region in here]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _moved(box: Box, by: Shape) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)


class Part(NamedTuple):
    """One rank's share of a piece: a region, as a run of the piece's elements."""

    rank: int
    box: Box
    """The box that the rank holds."""
    region: Box
    run: Box
    at: int
    """The run's first element in the piece."""


def parts(piece: Piece, shape: Shape) -> Iterable[Part]:
    """Yield the ranks' shares of a piece, in an order that sender and writer share."""
    at = 0
    for run in runs(shape, piece.first, piece.length):
        for box, rank in piece.sources:
            region = run.overlap(box)
            if region is not None:
                yield Part(rank, box, region, run, at)
        at += run.elements()


class Inbox:
    """The bytes that a rank receives in one round; the writing thread takes them once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_gone = threading.Event()
        """Set once the bytes are written."""
        self._memory: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._is_there = threading.Event()

    def deliver(self, memory: torch.Tensor) -> None:
        """Hand over the bytes."""
        self._memory = memory
        self._is_there.set()

    def fail(self, error: BaseException) -> None:
        """Note that the bytes will not arrive."""
        self._error = self._error or error
        self._is_there.set()

    def load(self) -> Placed:
        """Return the bytes once they have arrived; called by a thread of the save.

        Raises:
            BaseException: the bytes will not arrive.
        """
        self._is_there.wait()
        if self._error is not None:
            raise self._error
        memory, self._memory = self._memory, None
        assert memory is not None
        keeper = _Keeper(memory)
        weakref.finalize(keeper, self.is_gone.set).atexit = False
        return None, memory.data_ptr(), keeper


class _Keeper:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class Received(NamedTuple):
    """A piece that the writer assembles from received bytes."""

    piece: Piece
    shape: Shape
    dtype: torch.dtype
    at: int
    """The offset of its first byte in the inbox."""

    def fill(self, inbox: torch.Tensor, come: dict[int, _Stream], own: dict[Box, Cast]) -> None:
        """Assemble the piece from other ranks' bytes and this rank's part."""
        size = self.dtype.itemsize
        bytes_here = inbox[self.at : self.at + self.piece.length * size]
        is_aligned = self.at % size == 0
        words = (
            bytes_here.view(_WORDS[size])
            if is_aligned
            else torch.empty(self.piece.length, dtype=_WORDS[size], device="cpu")
        )
        for part in parts(self.piece, self.shape):
            to = words[part.at : part.at + part.run.elements()].view(part.run.sizes)
            for dim, (at, start, count) in enumerate(
                zip(part.region.offsets, part.run.offsets, part.region.sizes, strict=True)
            ):
                to = to.narrow(dim, at - start, count)
            if part.rank in come:
                came = come[part.rank].take(part.region.elements(), size)
            else:
                came = own[part.box].words(part.region)
            to.copy_(came.view(part.region.sizes))
        if not is_aligned:
            bytes_here.copy_(words.view(torch.uint8))


class _Stream:
    """The bytes of one rank, taken from the front."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._at = 0

    def take(self, count: int, size: int) -> torch.Tensor:
        nbytes = count * size
        taken = self._memory[self._at : self._at + nbytes]
        self._at += nbytes
        if taken.storage_offset() % size:
            taken = taken.clone()  # a view as larger integers must be aligned
        return taken.view(_WORDS[size])


class Sent(NamedTuple):
    """This rank's bytes of a piece to send."""

    cast: Cast
    region: Box


class Round:
    """One round: the bytes that a rank sends and receives at once."""

    def __init__(self) -> None:
        self.sent: dict[int, list[Sent]] = {}
        self.received: list[tuple[Received, dict[Box, Cast]]] = []
        self.expected: dict[int, int] = {}
        """Bytes from each other rank."""
        self.nbytes = 0
        """Bytes of the inbox."""
        self._out: dict[int, torch.Tensor] = {}
        self._came: dict[int, torch.Tensor] = {}

    def pack(self, device: str) -> None:
        """Assemble the bytes to send, and allocate memory for the bytes to receive."""
        self._out = {
            rank: torch.cat([one.cast.words(one.region).view(torch.uint8) for one in sent]).to(
                device
            )
            for rank, sent in self.sent.items()
        }
        self._came = {
            rank: torch.empty(nbytes, dtype=torch.uint8, device=device)
            for rank, nbytes in self.expected.items()
        }

    def exchange(self, team: Team) -> None:
        """Send and receive; all ranks have packed.

        Raises:
            Exception: the back end's error, if a rank is gone.
        """
        operations = [
            dist.P2POp(dist.isend, memory, team.global_rank(rank), team.group)
            for rank, memory in self._out.items()
        ] + [
            dist.P2POp(dist.irecv, memory, team.global_rank(rank), team.group)
            for rank, memory in self._came.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        self._out = {}

    def unpack(self) -> torch.Tensor:
        """Return the inbox: the pieces, assembled from the received bytes."""
        streams = {rank: _Stream(memory.cpu()) for rank, memory in self._came.items()}
        inbox = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        for received, own in self.received:
            received.fill(inbox, streams, own)
        self._came = {}
        return inbox
