"""Finds which node has which files of a checkpoint, if nodes share no directory."""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import NamedTuple

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import MissingFilesError
from ringstow._ranks._group import Group
from ringstow.dcp._paths import MANIFEST
from ringstow.distributed import _nodes
from ringstow.distributed._nodes import Nodes

_log = logging.getLogger("ringstow")


class Seen(NamedTuple):
    """A committed checkpoint of several nodes, as one rank sees it."""

    stamp: str
    """The fingerprint, the same on all nodes."""
    order: tuple[int, ...]
    """A greater value is newer; see `Step.order`."""


class Look(NamedTuple):
    """The contents of a path, as one rank finds them."""

    seen: Seen | None = None
    """None if there is no checkpoint, or one of another kind."""
    checkpoint: _native.Checkpoint | None = None
    """The opened checkpoint."""
    problem: Exception | None = None
    """Why the manifest cannot be read."""


class Whole(NamedTuple):
    """A checkpoint of several nodes. Each of its files is on at least one of them."""

    files: list[tuple[str, int]]
    """Name and bytes of each file."""
    holders: list[list[int]]
    """For each file, the ranks that see it."""
    chunk_bytes: int
    """Bytes of a checksum chunk."""

    def is_on_all(self, ranks: int) -> bool:
        """Return whether all of this many ranks see every file."""
        return all(len(holders) == ranks for holders in self.holders)

    def lacks(self, rank: int) -> list[int]:
        """Return the numbers of the files that a rank does not see."""
        return [number for number, ranks in enumerate(self.holders) if rank not in ranks]


class _Listed(NamedTuple):
    """The contents of a manifest."""

    files: list[tuple[str, int]]
    nodes: list[tuple[str, str, list[int]]]
    chunk_bytes: int


def look(path: str, config: str) -> Look:
    """Look for a checkpoint of several nodes."""
    marks = (os.path.join(_nodes.run_of(path), _nodes.FILE), os.path.join(path, MANIFEST))
    if not all(map(os.path.exists, marks)):
        return Look()
    try:
        checkpoint = _native.Checkpoint(path, config, damaged=True)
    except Exception as error:  # another node may have an intact one
        return Look(problem=error)
    if not _native.nodes_of(checkpoint):
        return Look()
    assert checkpoint.stamp is not None
    order = tuple(json.loads(checkpoint.info)["order"])
    return Look(Seen(checkpoint.stamp, order), checkpoint)


def find(group: Group, nodes: Nodes, path: str, own: Look, all_seen: list[Seen | None]) -> Whole:
    """Find the newest checkpoint at a path that is whole, and commit it on all nodes.

    All ranks of the group call this. A node may have no files of it, since it is new, or no
    manifest, since it was killed before its commit.

    Args:
        group: the ranks.
        nodes: the ranks that share a directory.
        path: the checkpoint's directory on this rank's node.
        own: what this rank finds there.
        all_seen: what each rank finds there.

    Raises:
        MissingFilesError: some of its files are on no node; names nodes and files.
        Error: another rank failed.
    """
    seen_here = {seen for seen in all_seen if seen is not None}
    found = sorted(seen_here, key=lambda seen: (seen.order, seen.stamp), reverse=True)
    why: MissingFilesError | None = None
    for candidate in found:
        manifest: bytes | None = None
        if any(seen != candidate for seen in all_seen):
            holder = all_seen.index(candidate)
            manifest = group.from_rank(holder, lambda: _manifest_at(path))
        listed = group.each(functools.partial(_listed, own, manifest))
        whole = Whole(listed.files, _holders(group, nodes, path, listed.files), listed.chunk_bytes)
        lost = _lost(nodes, path, listed, whole)
        if lost is None:
            if manifest is not None:
                adopts = own.seen != candidate and nodes.leads(group.rank)
                group.each(functools.partial(_adopt, path, manifest, adopts))
            return whole
        if group.is_first:
            _log.warning("%s", lost)
        why = why or lost
    assert why is not None
    raise why


def _manifest_at(path: str) -> bytes:
    with _files.reading(os.path.join(path, MANIFEST)) as file:
        return file.read()


def _listed(own: Look, manifest: bytes | None) -> _Listed:
    """Return the contents of a manifest; of this rank's own if none is given."""
    if manifest is None:
        assert own.checkpoint is not None
        files = [(name, nbytes) for name, _, nbytes, _ in _native.files_of(own.checkpoint)]
        chunk_bytes = json.loads(own.checkpoint.info)["block_bytes"]
        return _Listed(files, _native.nodes_of(own.checkpoint), chunk_bytes)
    listed = json.loads(manifest)
    return _Listed(
        [(file["name"], file["bytes"]) for file in listed["files"]],
        [(node["id"], node["host"], node["ranks"]) for node in listed["nodes"]],
        listed["block_bytes"],
    )


def _holders(
    group: Group, nodes: Nodes, path: str, files: list[tuple[str, int]]
) -> list[list[int]]:
    """Return which ranks see which file."""

    def here() -> list[int]:
        if not nodes.leads(group.rank):
            return []
        return [n for n, (name, nbytes) in enumerate(files) if _is_here(path, name, nbytes)]

    holders: list[list[int]] = [[] for _ in files]
    all_here = group.together(here)
    for _, _, ranks in nodes.found:
        for number in all_here[ranks[0]]:
            holders[number] += ranks
    return holders


def _lost(nodes: Nodes, path: str, listed: _Listed, whole: Whole) -> MissingFilesError | None:
    """Return the error of a checkpoint that is not whole."""
    pairs = zip(whole.files, whole.holders, strict=True)
    lost = [name for (name, _), ranks in pairs if not ranks]
    if not lost:
        return None
    gone = [node for node in listed.nodes if node[0] not in nodes.ids]
    of = f" Not here: the directories of {_nodes.text_of(gone)}." if gone else ""
    one = len(nodes.found) == 1 and len(listed.nodes) > 1
    hint = (
        " If each node has a directory of its own, say so: nodes=ringstow.Nodes()." if one else ""
    )
    more = " ..." if len(lost) > 5 else ""
    return MissingFilesError(
        f"{path}: {len(lost)} of {len(whole.files)} files are lost: on none of the "
        f"{len(nodes.found)} nodes: {', '.join(lost[:5])}{more}.{of}{hint} Bring the node's "
        "disk back, or go back to an earlier checkpoint",
        path=path,
    )


def _is_here(path: str, name: str, nbytes: int) -> bool:
    """Return whether a file is in a directory, under its final or its uncommitted name."""
    for one in (name, f"{name}.part"):
        try:
            found = os.lstat(os.path.join(path, one))
        except OSError:
            continue
        return found.st_size == nbytes
    return False


def _adopt(path: str, manifest: bytes, adopts: bool) -> None:
    """Commit a checkpoint on a node that does not have its manifest yet."""
    if not adopts:
        return
    _log.warning("%s was committed on another node: committing it here", path)
    try:
        _native.adopt(path, manifest)
    except Exception as error:
        error.add_note(f"while {path} was committed, as another node had done")
        raise
