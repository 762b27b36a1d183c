"""Nodes: groups of ranks that share a directory of checkpoints, which other nodes cannot see."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import NamedTuple

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import InvalidStateError
from ringstow._ranks._group import Group

FILE = ".ringstow-node.json"
"""Identifies a directory of checkpoints."""

View = tuple[str, int, int]
"""A rank's host, and the device and inode of its directory."""


class Nodes(NamedTuple):
    """The nodes of a group, in the order of their first ranks."""

    own: int
    """The number of this rank's node."""
    found: list[tuple[str, str, list[int]]]
    """For each node, the id of its directory, its host and its ranks."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node."""
        return self.found[self.own][2]

    def leads(self, rank: int) -> bool:
        """Return whether this rank is the first of its node."""
        return rank == self.ranks[0]

    @property
    def ids(self) -> set[str]:
        """The ids of all nodes."""
        return {node for node, _, _ in self.found}

    def number_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(n for n, (_, _, ranks) in enumerate(self.found) if rank in ranks)


def meet(group: Group, run: str) -> Nodes:
    """Detect, on all ranks, which ranks share their directory of checkpoints.

    Creates the directory if it is missing.

    Raises:
        InvalidStateError: a directory is a copy of another one, and has its id.
        Error: another rank failed.
        OSError: this rank cannot create or read it.
    """
    all_said = group.together(lambda: _own(run))
    found: dict[str, tuple[str, str, list[int]]] = {}
    views: dict[str, set[View]] = {}
    for rank, (node, host, view) in enumerate(all_said):
        found.setdefault(node, (node, host, []))[2].append(rank)
        views.setdefault(node, set()).add(view)
    own, _, _ = all_said[group.rank]
    nodes = Nodes(list(found).index(own), list(found.values()))
    if any(len(seen_as) > 1 for seen_as in views.values()):
        _refuse_copies(group, nodes, run)
    return nodes


def _own(run: str) -> tuple[str, str, View]:
    node, host = _native.node_id(run)
    seen = os.stat(run)
    return node, host, (socket.gethostname(), seen.st_dev, seen.st_ino)


def _refuse_copies(group: Group, nodes: Nodes, run: str) -> None:
    """Make sure that ranks whose directories have the same id see the same directory.

    On a network file system they do, although the hosts differ.

    Raises:
        InvalidStateError: a rank does not see a file that the first rank of its node writes.
    """
    asked = ("copies", run, *nodes.ids)
    if asked in group.known:
        return
    mark = f"{FILE}.{nodes.ranks[0]:016x}.part"
    path = os.path.join(run, mark)

    def mark_it() -> None:
        if nodes.leads(group.rank):
            _files.fresh(path).close()

    group.each(mark_it)
    all_see = group.together(lambda: mark in os.listdir(run))
    blind = [rank for rank, sees in enumerate(all_see) if not sees]
    if nodes.leads(group.rank):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if blind:
        raise InvalidStateError(
            f"rank(s) {', '.join(map(str, blind))}: {os.path.join(run, FILE)} was copied from "
            "another node, whose id it has: remove it there, and the next save makes another"
        )
    group.known[asked] = True


def refuse(config: str, **others: object) -> None:
    """Refuse options that need a directory that all ranks share.

    Raises:
        InvalidStateError: names the option.
    """
    settings = json.loads(config)
    asked = {"stripe": settings["stripe"], "recycle": settings["recycle"], **others}
    for name in (name for name, value in asked.items() if value):
        raise InvalidStateError(
            f"{name} is for a directory that all ranks share: leave out {name}, or nodes"
        )


def run_of(path: str) -> str:
    """Return the directory that a checkpoint is in, with links resolved."""
    return os.path.dirname(os.path.realpath(path))


def text_of(nodes: list[tuple[str, str, list[int]]]) -> str:
    """Return hosts and ids of nodes, for messages."""
    return ", ".join(f"{host} ({node})" for node, host, _ in nodes)
