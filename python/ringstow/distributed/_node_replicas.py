"""Copies of each node's files on other nodes, in case a node is lost with its disk."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ringstow import _native
from ringstow._core._errors import Error, IncompleteCheckpointError, NoCheckpointError
from ringstow._ranks._group import Group
from ringstow._saving._copy_queue import passes
from ringstow._saving._single_files import FileWriter, open_write
from ringstow.dcp._paths import MANIFEST
from ringstow.distributed import _nodes
from ringstow.distributed._node_fetch import Source, bytes_of, cut
from ringstow.distributed._nodes import Nodes


class _Problem(NamedTuple):
    """Why a file was not copied."""

    text: str
    is_temporary: bool
    """Whether another try may succeed, for example after a full disk."""


class _Copy(NamedTuple):
    """A file that one rank sends to another."""

    sender: int
    to: int
    number: int
    """Bytes of the file."""


def replicate(group: Group, path: str, copies: int, settings: str) -> None:
    """Copy each file to its nodes: the node that wrote it and ``copies - 1`` more.

    A new node that replaces a lost one gets the lost node's files, too. All ranks of the group call
    it. Each file is verified with its checksums on the way, and is durable on the other node before
    it gets its name. Files that exist there are not sent.

    Raises:
        NoCheckpointError: the checkpoint was removed from a node, or replaced there, meanwhile.
        OSError: files could not be copied, but another try may succeed; the others are copied.
            Names the first ones, with rank and reason.
        Error: files could not be copied, and another try would fail, too.
    """
    nodes = _nodes.meet(group, _nodes.run_of(path))
    checkpoint = _opened(group, path, settings)
    files = _native.files_of(checkpoint)
    here = [number for number, (*_, is_here) in enumerate(files) if is_here]
    has = [set(numbers) for numbers in group.gathered(here)]
    plan = list(_plan(nodes, [name for name, *_ in files], has, copies))
    copying = _Copying(group, path, checkpoint)
    sender = threading.Thread(target=copying.send, args=(plan,), name="ringstow-replicas")
    sender.start()
    try:
        copying.receive(plan)
    finally:
        sender.join()
    all_problems = group.gathered(copying.problems)
    _opened(group, path, settings)
    problems = [(rank, problem) for rank, each in enumerate(all_problems) for problem in each]
    if problems:
        texts = [f"rank {rank}: {problem.text}" for rank, problem in problems]
        more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
        kind = OSError if any(problem.is_temporary for _, problem in problems) else Error
        raise kind(f"{path}: not copied to another node: {'; '.join(texts[:3])}{more}")


def _opened(group: Group, path: str, settings: str) -> _native.Checkpoint:
    """Open a checkpoint that all nodes have."""

    def opened() -> _native.Checkpoint | None:
        try:
            return _native.Checkpoint(path, settings, damaged=True)
        except (FileNotFoundError, IncompleteCheckpointError):
            return None

    checkpoint = group.each(opened)
    stamps = set(group.gathered(None if checkpoint is None else checkpoint.stamp))
    if checkpoint is None or len(stamps) > 1:
        raise NoCheckpointError(f"{path} was removed from a node, or replaced there", path=path)
    return checkpoint


def _plan(nodes: Nodes, files: list[str], has: list[set[int]], copies: int) -> Iterator[_Copy]:
    """Yield sender, receiver and file of each copy, in the order in which all ranks work.

    A file belongs on the node of the rank in its name, and on the next nodes. All ranks send and
    receive in this order at the same time, so that no deadlock is possible.
    """
    count, size = len(nodes.found), len(has)
    node_of = {rank: n for n, (_, _, ranks) in enumerate(nodes.found) for rank in ranks}
    for distance in range(min(copies, count)):
        for number, name in enumerate(files):
            home = rank_of(name) % size  # another number of ranks may have saved it
            there = nodes.found[(node_of[home] + distance) % count][2]
            to = there[nodes.found[node_of[home]][2].index(home) % len(there)]
            if number in has[to]:
                continue
            holders = [home] if number in has[home] else []
            holders = holders or [rank for rank in range(size) if number in has[rank]]
            if holders:
                yield _Copy(holders[number % len(holders)], to, number)


def _identity(path: str) -> tuple[int, int] | None:
    """Return an identity of a checkpoint's manifest; None if it has no manifest."""
    try:
        found = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def rank_of(name: str) -> int:
    """Return the rank in a file's name, such as ``rank00003-0.g1.safetensors``."""
    return int(name[len("rank") : name.index("-")])


class _Copying:
    """One rank's part of a replication."""

    def __init__(self, group: Group, path: str, checkpoint: _native.Checkpoint) -> None:
        self._group = group
        self._path = path
        self._checkpoint = checkpoint
        self._files = _native.files_of(checkpoint)
        self._manifest = _identity(path)
        self._chunk_bytes: int = json.loads(checkpoint.info)["block_bytes"]
        self.problems: list[_Problem] = []

    def send(self, plan: list[_Copy]) -> None:
        """Send files. If a connection is lost, the receiver fails, too."""
        try:
            for one in plan:
                if one.sender == self._group.rank:
                    _, path, nbytes, _ = self._files[one.number]
                    source = Source(self._checkpoint, one.number, path)
                    with contextlib.closing(source):
                        for piece in source.pieces(0, nbytes, self._chunk_bytes):
                            self._group.send(piece, one.to)
        except Exception as error:
            self.problems.append(_Problem(str(error), passes(error)))

    def receive(self, plan: list[_Copy]) -> None:
        """Receive files."""
        for one in plan:
            if one.to == self._group.rank:
                target = os.path.join(self._path, self._files[one.number][0])
                problem = self._receive(one, target)
                if problem is not None:
                    self.problems.append(problem._replace(text=f"{target}: {problem.text}"))

    def _receive(self, one: _Copy, target: str) -> _Problem | None:
        """Receive a whole file even after a failure, since its sender waits. Return the failure."""
        problem: _Problem | None = None
        writer: FileWriter | None = None
        try:
            writer = open_write(target)
        except Exception as error:  # the sender waits even after a failure
            problem = _Problem(str(error), passes(error))
        for begin, size in cut(0, self._files[one.number][2], self._chunk_bytes):
            piece = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._group.receive(piece, one.sender)
            if problem is None and writer is not None:
                problem = self._keep(writer, one.number, begin, piece)
        if writer is not None:
            if problem is None and _identity(self._path) != self._manifest:
                problem = _Problem("the checkpoint was removed or replaced meanwhile", False)
            try:
                writer.close() if problem is None else writer.abort()
            except Exception as error:
                problem = _Problem(str(error), passes(error))
        return problem

    def _keep(
        self, writer: FileWriter, number: int, begin: int, piece: torch.Tensor
    ) -> _Problem | None:
        try:
            difference = _native.differing(self._checkpoint, number, begin, bytes_of(piece))
            if difference is not None:
                return _Problem(difference, False)
            writer.write(bytes_of(piece))
        except Exception as error:  # as above
            return _Problem(str(error), passes(error))
        return None
