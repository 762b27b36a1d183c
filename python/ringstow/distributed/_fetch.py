"""What a rank needs of files that are on other nodes: they send it before the load reads it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ringstow import _native
from ringstow._errors import CorruptCheckpointError
from ringstow.distributed import _nodes
from ringstow.distributed._group import Group
from ringstow.distributed._whole import Whole

PREFIX = ".ringstow-fetched-"
"""How directories of fetched files begin; they are beside the checkpoints."""
_PIECE_BYTES = 8 << 20


class Fetched(NamedTuple):
    """Where a load finds what it fetches: in a stripe of the checkpoint."""

    stripe: str
    directory: str
    config: str
    """The settings, in JSON, with that stripe."""


class _Transfer(NamedTuple):
    """A range of a file that one rank needs and another sends."""

    to: int
    number: int
    """Of the file."""
    begin: int
    end: int


@contextlib.contextmanager
def room(path: str, whole: Whole, rank: int, config: str) -> Iterator[Fetched]:
    """Make room for files that this rank does not see, of their full length, without their bytes.

    Until they are fetched, reading them gives zeros, which no checksum accepts.
    """
    run = _nodes.run_of(path)
    _clear(run)
    with _locked(run, fcntl.LOCK_SH):
        stripe = tempfile.mkdtemp(prefix=PREFIX, dir=run)
        lock = os.open(stripe, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        inner = os.path.join(stripe, os.path.basename(os.path.realpath(path)))
        os.mkdir(inner)
        for number in whole.lacks(rank):
            name, nbytes = whole.files[number]
            with open(os.path.join(inner, name), "xb") as file:
                file.truncate(nbytes)
        with open(os.path.join(inner, "companion.json"), "x") as file:
            json.dump({"checkpoint": os.path.realpath(path)}, file)
        settings = json.loads(config)
        settings["stripe"] = [*settings.get("stripe", ()), stripe]
        yield Fetched(stripe, inner, json.dumps(settings))
    finally:
        shutil.rmtree(stripe, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _clear(run: str) -> None:
    """Remove what killed loads have left: nobody has locked it."""
    alone = fcntl.LOCK_EX | fcntl.LOCK_NB
    # While this has the run's lock, nobody is about to lock a directory that it has just made.
    with contextlib.suppress(BlockingIOError), _locked(run, alone):
        for name in filter(lambda name: name.startswith(PREFIX), os.listdir(run)):
            path = os.path.join(run, name)
            with contextlib.suppress(OSError), _locked(path, alone):
                shutil.rmtree(path, ignore_errors=True)


class Needs:
    """Fetches, on all ranks at once, what each needs of files that it does not see."""

    def __init__(self, group: Group, whole: Whole, path: str, fetched: Fetched) -> None:
        self._group = group
        self._whole = whole
        self._path = path
        self._fetched = fetched
        self._error: OSError | None = None
        """Why this rank cannot keep what it is sent."""
        self._paths: list[str] = []

    def fetch(self, checkpoint: _native.Checkpoint, ranges: list[tuple[int, int, int]]) -> None:
        """Fetch ranges of files (number, first byte, end) as far as this rank does not see them.

        All ranks of the group call it. If a rank cannot read what it should send, another one that
        sees the file sends it.

        Raises:
            CorruptCheckpointError: nobody can read a range: says why not.
            Error: another rank failed.
        """
        lacks = set(self._whole.lacks(self._group.rank))
        self._paths = [path for _, path, *_ in _native.files_of(checkpoint)]
        own = [_Transfer(self._group.rank, *one) for one in ranges if one[0] in lacks]
        due = [one for all_own in self._group.gathered(own) for one in all_own]
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
        """Send or receive a range, if this rank is one of the two. What fails is told later."""
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
        file = -1
        try:
            file = os.open(os.path.join(self._fetched.directory, name), os.O_WRONLY)
        except OSError as error:
            self._error = error
        try:
            for begin, size in cut(one.begin, one.end, self._whole.chunk_bytes):
                piece = torch.empty(size, dtype=torch.uint8)
                self._group.receive(piece, sender)
                if self._error is None:
                    self._keep(file, piece, begin)
        finally:
            if file >= 0:
                os.close(file)

    def _keep(self, file: int, piece: torch.Tensor, begin: int) -> None:
        try:
            os.pwrite(file, bytes_of(piece), begin)
        except OSError as error:  # the disk is full
            self._error = error


def cut(begin: int, end: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first byte and length of the pieces in which a range travels: whole checksum chunks."""
    step = max(_PIECE_BYTES // chunk_bytes, 1) * chunk_bytes
    for at in range(begin, end, step):
        yield at, min(step, end - at)


def bytes_of(piece: torch.Tensor) -> Any:
    """Return the bytes of a piece: a buffer, although NumPy's stubs do not say so."""
    return piece.numpy()


class Source:
    """A file that this rank reads for another; what it cannot read, it sends as zeros."""

    def __init__(self, checkpoint: _native.Checkpoint, number: int, path: str) -> None:
        self._checkpoint = checkpoint
        self._number = number
        self.problem: str | None = None
        """Why some of it cannot be read."""
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            self.problem = str(error)

    def pieces(self, begin: int, end: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Read a range that begins and ends with a checksum chunk, and check it."""
        for at, size in cut(begin, end, chunk_bytes):
            yield self._piece(at, size)

    def _piece(self, begin: int, size: int) -> torch.Tensor:
        piece = torch.zeros(size, dtype=torch.uint8)
        if self.problem is not None:
            return piece
        try:
            got = os.preadv(self._file, [bytes_of(piece)], begin)
        except OSError as error:
            self.problem = str(error)
            return piece
        if got < size:
            self.problem = f"the file ends at {begin + got}"
        else:
            self.problem = _native.differing(self._checkpoint, self._number, begin, bytes_of(piece))
        return piece

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
