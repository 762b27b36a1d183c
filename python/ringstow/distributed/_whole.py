"""Which files of a checkpoint are on which node, if its nodes share no directory."""

from __future__ import annotations

import json
import logging
import os
from typing import NamedTuple

from ringstow import _native
from ringstow._errors import Error, MissingFilesError
from ringstow.distributed import _nodes
from ringstow.distributed._group import Group
from ringstow.distributed._nodes import Nodes

_log = logging.getLogger("ringstow")
_MANIFEST = "manifest.json"


class Seen(NamedTuple):
    """A committed checkpoint of several nodes, as one rank sees it."""

    stamp: str
    """Its fingerprint, the same on all nodes."""
    created_unix_ms: int


class Whole(NamedTuple):
    """A checkpoint of several nodes, all of whose files are on some node."""

    stamp: str
    files: list[tuple[str, int]]
    """Name and bytes of each."""
    holders: list[list[int]]
    """Of each, the ranks that see it."""
    chunk_bytes: int
    """Of a checksum chunk."""

    def is_on_all(self, ranks: int) -> bool:
        """Return whether each of so many ranks sees each file."""
        return all(len(holders) == ranks for holders in self.holders)

    def lacks(self, rank: int) -> list[int]:
        """Return the numbers of the files that a rank does not see."""
        return [number for number, ranks in enumerate(self.holders) if rank not in ranks]


def seen(path: str, config: str) -> tuple[Seen | None, Exception | None]:
    """Return the checkpoint of several nodes at a path, or why its manifest cannot be read.

    Neither, if there is none, or one of another kind.
    """
    marks = (os.path.join(_nodes.run_of(path), _nodes.FILE), os.path.join(path, _MANIFEST))
    if not all(map(os.path.exists, marks)):
        return None, None
    try:
        checkpoint = _native.Checkpoint(path, config, damaged=True)
    except Exception as error:  # another node may have an intact one
        return None, error
    if not _native.nodes_of(checkpoint):
        return None, None
    assert checkpoint.stamp is not None
    return Seen(checkpoint.stamp, json.loads(checkpoint.info)["created_unix_ms"]), None


def find(group: Group, nodes: Nodes, path: str, config: str, all_seen: list[Seen | None]) -> Whole:
    """Find the newest checkpoint at a path that is whole, and commit it on all nodes.

    All ranks of the group call this. A node may have nothing of it, since it is new, or not the
    manifest, since it was killed before it committed.

    Args:
        group: the ranks.
        nodes: which of them share a directory.
        path: the checkpoint's directory on this rank's node.
        config: the settings, in JSON.
        all_seen: what each rank sees there.

    Raises:
        MissingFilesError: files of it are on no node: names nodes and files.
        Error: another rank failed.
    """
    found = sorted({s for s in all_seen if s is not None}, key=lambda s: (-s[1], s[0]))
    why: MissingFilesError | None = None
    for candidate in found:
        holder = all_seen.index(candidate)
        manifest = _manifest(group, path, holder, is_known=all(s == candidate for s in all_seen))
        whole, lost = _held(group, nodes, (path, config), candidate, manifest)
        if lost is None:
            assert whole is not None
            _commit(
                group, nodes, (path, config), manifest, is_there=all_seen[group.rank] == candidate
            )
            return whole
        if group.is_first:
            _log.warning("%s", lost)
        why = why or lost
    assert why is not None
    raise why


def _manifest(group: Group, path: str, holder: int, *, is_known: bool) -> bytes | None:
    """Return the manifest that one rank has, on all ranks; None if all have it."""
    if is_known:
        return None
    content = b""
    error: BaseException | None = None
    try:
        if group.rank == holder:
            with open(os.path.join(path, _MANIFEST), "rb") as file:
                content = file.read()
    except OSError as caught:
        error = caught
    group.agreed(error, None)
    return group.from_rank(holder, content)


def _held(
    group: Group, nodes: Nodes, at: tuple[str, str], seen: Seen, manifest: bytes | None
) -> tuple[Whole | None, MissingFilesError | None]:
    """Return which ranks see which files, or why the checkpoint is not whole."""
    path, config = at
    files: list[tuple[str, int]] = []
    writers: list[tuple[str, str, list[int]]] = []
    here: list[int] = []
    chunk_bytes = 0
    error: BaseException | None = None
    try:
        if manifest is None:
            checkpoint = _native.Checkpoint(path, config, damaged=True)
            rows = _native.files_of(checkpoint)
            files, writers = [(row[0], row[2]) for row in rows], _native.nodes_of(checkpoint)
            chunk_bytes = json.loads(checkpoint.info)["block_bytes"]
        else:
            listed = json.loads(manifest)
            chunk_bytes = listed["block_bytes"]
            files = [(file["name"], file["bytes"]) for file in listed["files"]]
            writers = [(node["id"], node["host"], node["ranks"]) for node in listed["nodes"]]
        if group.rank == nodes.ranks[0]:
            here = [n for n, (name, size) in enumerate(files) if _is_here(path, name, size)]
    except BaseException as caught:  # the other ranks must not wait for this one
        error = caught
    holders: list[list[int]] = [[] for _ in files]
    all_here = group.agreed(error, here)
    for _, _, ranks in nodes.found:
        for number in all_here[ranks[0]]:
            holders[number] += ranks
    lost = [name for (name, _), ranks in zip(files, holders, strict=True) if not ranks]
    if lost:
        gone = [node for node in writers if node[0] not in nodes.ids]
        of = f" Not here: the directories of {_nodes.text_of(gone)}." if gone else ""
        one = len(nodes.found) == 1 and len(writers) > 1
        hint = " If each node has a directory of its own, say so: node_local=True." if one else ""
        more = " ..." if len(lost) > 5 else ""
        return None, MissingFilesError(
            f"{path}: {len(lost)} of {len(files)} files are lost: on none of the "
            f"{len(nodes.found)} nodes: {', '.join(lost[:5])}{more}.{of}{hint} Bring the node's "
            "disk back, or go back to an earlier checkpoint",
            path=path,
        )
    return Whole(seen.stamp, files, holders, chunk_bytes), None


def _is_here(path: str, name: str, nbytes: int) -> bool:
    """Return whether a file is in a directory, under its name or the one before its commit."""
    for one in (name, f"{name}.part"):
        try:
            found = os.lstat(os.path.join(path, one))
        except OSError:
            continue
        return found.st_size == nbytes
    return False


def _commit(
    group: Group, nodes: Nodes, at: tuple[str, str], manifest: bytes | None, *, is_there: bool
) -> None:
    """Commit the checkpoint on the nodes that have no manifest of it yet."""
    path, config = at
    error: BaseException | None = None
    try:
        if not is_there and manifest is not None and group.rank == nodes.ranks[0]:
            _log.warning("%s was committed on another node: committing it here", path)
            _native.adopt(path, manifest, config)
    except BaseException as caught:  # the other ranks must not wait for this one
        error = caught
    try:
        group.agreed(error, None)
    except Error as other:
        other.add_note(f"while {path} was committed on the nodes that had no manifest of it")
        raise
