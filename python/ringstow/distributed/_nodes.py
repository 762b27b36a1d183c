"""Nodes: ranks that share a directory of checkpoints, which the others do not see."""

from __future__ import annotations

import os
from typing import NamedTuple

from ringstow import _native
from ringstow.distributed._group import Group

FILE = ".ringstow-node.json"
"""Identifies a directory of checkpoints."""


class Nodes(NamedTuple):
    """The nodes of a group, in the order of their first ranks."""

    own: int
    """Number of this rank's."""
    found: list[tuple[str, str, list[int]]]
    """Of each, the id of its directory, its host and its ranks."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node."""
        return self.found[self.own][2]

    @property
    def ids(self) -> set[str]:
        """The ids of all."""
        return {node for node, _, _ in self.found}

    def number_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(n for n, (_, _, ranks) in enumerate(self.found) if rank in ranks)


def meet(group: Group, run: str) -> Nodes:
    """Find out, on all ranks, which of them share their directory of checkpoints.

    Creates the directory where it is missing.

    Raises:
        Error: another rank failed.
        OSError: this one cannot create or read it.
    """
    own: tuple[str, str] | None = None
    error: BaseException | None = None
    try:
        own = _native.node_id(run)
    except BaseException as caught:  # the other ranks must not wait for this one
        error = caught
    found: dict[str, tuple[str, str, list[int]]] = {}
    for rank, said in enumerate(group.agreed(error, own)):
        assert said is not None
        node, host = said
        found.setdefault(node, (node, host, []))[2].append(rank)
    assert own is not None
    return Nodes(list(found).index(own[0]), list(found.values()))


def run_of(path: str) -> str:
    """Return the directory that a checkpoint is in."""
    return os.path.dirname(os.path.abspath(path))


def text_of(nodes: list[tuple[str, str, list[int]]]) -> str:
    """Return hosts and ids of nodes, for messages."""
    return ", ".join(f"{host} ({node})" for node, host, _ in nodes)
