"""Fetches missing data: other nodes send a node the file ranges that it needs for a load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import torch

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import CorruptCheckpointError
from ringstow._ranks._group import Group
from ringstow.distributed._fetched_files import Room
from ringstow.distributed._node_files import Whole
from ringstow.distributed._nodes import Nodes

_PIECE_BYTES = 8 << 20
_TRANSFER_PIECES = 8

Range = tuple[int, int, int]
"""A range of a file: the file's number, the first byte, and the end."""


class _Transfer(NamedTuple):
    """A range of a file that one rank sends to another, once per receiving node."""

    to: int
    number: int
    """Of the file."""
    begin: int
    end: int


class Needs:
    """Fetches, on all ranks at once, the ranges that each node needs of files that it lacks."""

    def __init__(self, group: Group, nodes: Nodes, whole: Whole, path: str, room: Room) -> None:
        self._group = group
        self._nodes = nodes
        self._whole = whole
        self._path = path
        self.room = room
        self._error: OSError | None = None
        """Why this rank cannot store the bytes that it receives."""
        self._paths: list[str] = []

    def fetch_all(self) -> None:
        """Fetch every file that this rank's node lacks; otherwise the same as `fetch`."""
        checkpoint = self.opened()
        every = [(number, 0, nbytes) for number, (_, nbytes) in enumerate(self._whole.files)]
        self.fetch(checkpoint, every)

    def opened(self) -> _native.Checkpoint:
        """Open the checkpoint on all ranks. The load finds and repairs damage.

        Raises:
            Error: another rank failed.
            Exception: this rank failed.
        """
        config = self.room.config
        return self._group.each(lambda: _native.Checkpoint(self._path, config, damaged=True))

    def fetch(self, checkpoint: _native.Checkpoint, ranges: list[Range]) -> None:
        """Fetch the ranges of files that this rank's node lacks.

        All ranks of the group call it. If a rank cannot read a range that it should send, another
        rank that sees the file sends it.

        Raises:
            CorruptCheckpointError: no rank can read a range; says why not.
            Error: another rank failed.
        """
        lacks = set(self._whole.lacks(self._group.rank))
        self._paths = [path for _, path, *_ in _native.files_of(checkpoint)]
        all_needed = self._group.gathered([one for one in ranges if one[0] in lacks])
        due = list(self._transfers(all_needed))
        tried: dict[_Transfer, list[int]] = {one: [] for one in due}
        while due:
            failed: dict[_Transfer, str] = {}
            for number, one in enumerate(due):
                sender = self._sender(one, number, tried[one])
                tried[one].append(sender)
                self._transfer(checkpoint, one, sender, failed)
            said = self._group.agreed(self._error, list(failed.items()))
            failed = {one: why for each in said for one, why in each}
            due = list(failed)
            self._refuse_lost(due, tried, failed)

    def _transfers(self, all_needed: list[list[Range]]) -> Iterator[_Transfer]:
        """Yield the ranges that each node fetches, each once, spread over its ranks."""
        for _, _, ranks in self._nodes.found:
            needed = joined(one for rank in ranks for one in all_needed[rank])
            pieces = (
                (number, at, size)
                for number, begin, end in needed
                for at, size in cut(begin, end, self._whole.chunk_bytes, _TRANSFER_PIECES)
            )
            for turn, (number, at, size) in enumerate(pieces):
                yield _Transfer(ranks[turn % len(ranks)], number, at, at + size)

    def _sender(self, one: _Transfer, number: int, tried: list[int]) -> int:
        able = [rank for rank in self._whole.holders[one.number] if rank not in tried]
        return able[(one.to + number) % len(able)]

    def _refuse_lost(
        self, due: list[_Transfer], tried: dict[_Transfer, list[int]], failed: dict[_Transfer, str]
    ) -> None:
        for one in due:
            if all(rank in tried[one] for rank in self._whole.holders[one.number]):
                name, _ = self._whole.files[one.number]
                raise CorruptCheckpointError(
                    f"{self._path}: no node can read bytes {one.begin} to {one.end} of {name}: "
                    f"{failed[one]}",
                    file=os.path.join(self._path, name),
                    offset=one.begin,
                    got=failed[one],
                )

    def _transfer(
        self,
        checkpoint: _native.Checkpoint,
        one: _Transfer,
        sender: int,
        failed: dict[_Transfer, str],
    ) -> None:
        """Send or receive a range, if this rank takes part. Put failures into ``failed``."""
        if one.to == self._group.rank:
            self._receive(one, sender)
        elif sender == self._group.rank:
            path = self._paths[one.number]
            with contextlib.closing(Source(checkpoint, one.number, path)) as source:
                for piece in source.pieces(one.begin, one.end, self._whole.chunk_bytes):
                    self._group.send(piece, one.to)
            if source.problem is not None:
                failed[one] = source.problem

    def _receive(self, one: _Transfer, sender: int) -> None:
        name, _ = self._whole.files[one.number]
        file: BinaryIO | None = None
        try:
            file = _files.rewriting(os.path.join(self.room.directory, name))
        except OSError as error:
            self._error = error
        try:
            for begin, size in cut(one.begin, one.end, self._whole.chunk_bytes):
                piece = torch.empty(size, dtype=torch.uint8, device="cpu")
                self._group.receive(piece, sender)
                if self._error is None and file is not None:
                    self._keep(file, piece, begin)
        finally:
            if file is not None:
                file.close()

    def _keep(self, file: BinaryIO, piece: torch.Tensor, begin: int) -> None:
        try:
            os.pwrite(file.fileno(), bytes_of(piece), begin)
        except OSError as error:  # the disk is full
            self._error = OSError(error.errno, error.strerror, self.room.directory)


def joined(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield ranges by file and offset; merge adjacent ones."""
    last: Range | None = None
    for number, begin, end in sorted(ranges):
        if last is not None and last[0] == number and begin <= last[2]:
            last = number, last[1], max(last[2], end)
            continue
        if last is not None:
            yield last
        last = number, begin, end
    if last is not None:
        yield last


def cut(begin: int, end: int, chunk_bytes: int, pieces: int = 1) -> Iterator[tuple[int, int]]:
    """Yield first byte and length of each piece of a range: whole checksum chunks."""
    step = max(_PIECE_BYTES // chunk_bytes, 1) * chunk_bytes * pieces
    for at in range(begin, end, step):
        yield at, min(step, end - at)


def bytes_of(piece: torch.Tensor) -> Any:
    """Return the bytes of a piece: a buffer, although NumPy's stubs do not say so."""
    return piece.numpy()


class Source:
    """A file that this rank reads for another; it sends zeros for unreadable bytes."""

    def __init__(self, checkpoint: _native.Checkpoint, number: int, path: str) -> None:
        self._checkpoint = checkpoint
        self._number = number
        self.problem: str | None = None
        """Why some of the file cannot be read."""
        self._file: BinaryIO | None = None
        try:
            self._file = _files.reading(path, links=False)
        except OSError as error:
            self.problem = str(error)

    def pieces(self, begin: int, end: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Read a range of whole checksum chunks, and verify it."""
        for at, size in cut(begin, end, chunk_bytes):
            yield self._piece(at, size)

    def _piece(self, begin: int, size: int) -> torch.Tensor:
        piece = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if self.problem is not None or self._file is None:
            return piece
        try:
            got = os.preadv(self._file.fileno(), [bytes_of(piece)], begin)
            if got < size:
                self.problem = f"the file ends at {begin + got}"
            else:
                content = bytes_of(piece)
                self.problem = _native.differing(self._checkpoint, self._number, begin, content)
        except Exception as error:  # the receiver waits even after a failure
            self.problem = f"{type(error).__name__}: {error}"
        return piece

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
