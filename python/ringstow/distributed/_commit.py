"""The commit of a save: in one directory that all ranks see, or on nodes that share none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ringstow import _native
from ringstow._core._errors import Error
from ringstow._ranks import _concurrent_saves
from ringstow._ranks._group import Group
from ringstow._ranks._team import raise_first
from ringstow._saving._base import Native
from ringstow.dcp import _mark
from ringstow.distributed import _merged_tree, _nodes


class Asked(NamedTuple):
    """The arguments of a call: equal on all ranks, except the path if nodes share no directory."""

    path: str
    step: int | None
    metrics: dict[str, float]
    apart: list[str]
    base: Native | None
    node_local: bool
    config: str

    def call(self) -> tuple[object, ...]:
        """Return the arguments that the ranks compare; metrics are only the first rank's.

        On nodes that share no directory, the paths may differ.
        """
        path = os.path.basename(self.path) if self.node_local else self.path
        return ("save", path, self.step, self.base, self.node_local, *self.apart)


class Written(NamedTuple):
    """The files that a rank has written, for the commit."""

    error: BaseException | None
    receipt: bytes = b""
    tree: str | None = None
    names: list[str] | None = None
    own: Mapping[str, str] = {}


class Directory(Protocol):
    """The place where a save commits."""

    def begin_alone(self) -> None:
        """Begin, before the ranks synchronize."""

    def begin_together(self) -> None:
        """Begin, once all ranks make the same call."""

    def commit(self, written: Written) -> None:
        """Commit on all ranks, or fail on all."""

    def abandon(self) -> None:
        """Abandon the save, and remove its files."""


class Shared:
    """One directory, which all ranks see: the first rank commits."""

    def __init__(self, group: Group, asked: Asked) -> None:
        self._group = group
        self._asked = asked
        self._session: _native.Session | None = None

    def begin_alone(self) -> None:
        one = self._asked
        if self._group.is_first:
            size = self._group.size
            self._session = _native.Session(one.path, size, one.config, None, one.step, one.metrics)

    def begin_together(self) -> None:
        pass

    def commit(self, written: Written) -> None:
        all_written = self._group.to_first(written)
        self._group.from_first(lambda: self._commit(all_written))

    def _commit(self, all_written: list[Written]) -> None:
        receipts, tree, names = _joined(all_written)
        session, path = self._session, self._asked.path
        assert session is not None
        session.commit(receipts, tree, names)
        _mark.write(path)
        _concurrent_saves.saved(path)

    def abandon(self) -> None:
        if self._session is not None:
            self._session.abandon()


class Apart:
    """A directory on each node: the first rank of each commits there.

    All nodes write the manifest before any commits, and all commit before any removes replaced
    files. So if some have committed and others were killed, all files exist, and a load finishes
    the commit.
    """

    def __init__(self, group: Group, asked: Asked) -> None:
        self._group = group
        self._asked = asked
        self._nodes: _nodes.Nodes | None = None
        self._session: _native.NodeSession | None = None

    def begin_alone(self) -> None:
        pass

    def begin_together(self) -> None:
        path, step, metrics, *_, config = self._asked
        nodes = self._nodes = _nodes.meet(self._group, _nodes.run_of(path))
        session = self._group.from_first(lambda: uuid.uuid4().hex[:16])

        def begin() -> None:
            if nodes.leads(self._group.rank):
                size = self._group.size
                self._session = _native.NodeSession(path, size, session, config, step, metrics)

        self._group.each(begin)

    def commit(self, written: Written) -> None:
        all_written = self._group.to_first(written)
        manifest = self._group.from_first(lambda: self._manifest(all_written))
        receipts = self._of_this_node(written.receipt)
        self._prepare(receipts, manifest)
        self._commit()
        if self._session is not None:
            self._session.end()
            _concurrent_saves.saved(self._asked.path)

    def _manifest(self, all_written: list[Written]) -> bytes:
        receipts, tree, names = _joined(all_written)
        assert self._session is not None
        assert self._nodes is not None
        return self._session.manifest(receipts, tree, names, self._nodes.found)

    def _of_this_node(self, receipt: bytes) -> list[bytes]:
        """Return, on the node's first rank, the receipts of the node's ranks."""
        assert self._nodes is not None
        first, *others = self._nodes.ranks
        if self._group.rank != first:
            self._group.send_bytes(receipt, first)
            return []
        return [receipt, *(self._group.receive_bytes(rank) for rank in others)]

    def _prepare(self, receipts: list[bytes], manifest: bytes) -> None:
        """Write the manifest on each node under its uncommitted name."""
        session = self._session
        error: BaseException | None = None
        try:
            if session is not None:
                session.prepare(_native.Receipts(receipts), manifest)
        except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
            error = caught
        try:
            self._group.agreed(error, None)
        except BaseException as failure:
            is_refused = error is not None or isinstance(failure, Error)
            if not is_refused and session is not None:
                session.keep()  # this rank cannot know whether the others continue
            raise

    def _commit(self) -> None:
        session = self._session
        try:
            self._group.each(lambda: None if session is None else session.commit())
        except BaseException as failure:
            failure.add_note(
                "All nodes have the files, and some may have committed them: a load on all nodes "
                "finds out"
            )
            raise

    def abandon(self) -> None:
        if self._session is not None:
            self._session.abandon()


def _joined(all_written: list[Written]) -> tuple[_native.Receipts, str, list[str]]:
    """Return the receipts, the tree and the names of all ranks.

    Raises:
        Error: a rank has failed to write its share.
    """
    raise_first(one.error for one in all_written)
    receipts = _native.Receipts([one.receipt for one in all_written])
    trees = [one.tree for one in all_written if one.tree is not None]
    names = [name for one in all_written for name in one.names or ()]
    return receipts, _merged_tree.merged(trees, [one.own for one in all_written]), names
