"""Replaces damaged files of one node with the intact copies of other nodes."""

from __future__ import annotations

import logging
import os

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import CorruptCheckpointError
from ringstow._ranks._group import Group
from ringstow.distributed._fetched_files import room
from ringstow.distributed._node_fetch import Needs
from ringstow.distributed._node_files import Whole
from ringstow.distributed._nodes import Nodes

_log = logging.getLogger("ringstow")


class Mender:
    """Replaces files of a checkpoint, each once."""

    def __init__(self, group: Group, nodes: Nodes, whole: Whole, at: tuple[str, str]) -> None:
        self._group = group
        self._nodes = nodes
        self._whole = whole
        self._path, self._config = at
        self._tried: set[tuple[int, int]] = set()

    def mend(self, errors: list[BaseException | None]) -> bool:
        """Replace the files that a load has found damaged; return whether to load again.

        All ranks of the group call it with the same errors.

        Args:
            errors: each rank's error.

        Raises:
            CorruptCheckpointError: the copies cannot be read either.
            Error: another rank failed.
        """
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed or not all(isinstance(one, CorruptCheckpointError) for _, one in failed):
            return False  # or the damage was found by the ranks that should have sent it
        damaged = {(self._nodes.number_of(rank), self._number_of(error)) for rank, error in failed}
        holders = [list(ranks) for ranks in self._whole.holders]
        for node, number in damaged:
            if number is None or (node, number) in self._tried:
                return False
            self._tried.add((node, number))
            here = self._nodes.found[node][2]
            holders[number] = [rank for rank in holders[number] if rank not in here]
            if not holders[number]:
                return False
        own = [n for node, n in damaged if node == self._nodes.own and n is not None]
        self._replace(self._whole._replace(holders=holders), own)
        return True

    def _number_of(self, error: BaseException) -> int | None:
        assert isinstance(error, CorruptCheckpointError)
        name = os.path.basename(error.file).removesuffix(".part")
        found = (number for number, (one, _) in enumerate(self._whole.files) if one == name)
        return next(found, None)

    def _replace(self, whole: Whole, own: list[int]) -> None:
        """Fetch files from other nodes. The first rank of the node puts them in their places."""
        own = own if self._nodes.leads(self._group.rank) else []
        with room(self._group, self._nodes, whole, self._path, self._config) as made:
            needs = Needs(self._group, self._nodes, whole, self._path, made)
            checkpoint = needs.opened()
            needs.fetch(checkpoint, [(number, 0, whole.files[number][1]) for number in own])
            files = _native.files_of(checkpoint)
            self._group.each(lambda: self._put(made.directory, [files[n] for n in own]))

    def _put(self, directory: str, files: list[tuple[str, str, int, bool]]) -> None:
        for name, target, _, _ in files:
            copy = os.path.join(directory, name)
            _files.sync(copy)
            os.replace(copy, target)
            _native.sync_dir(self._path)
            _log.warning("%s was damaged: it is replaced by the copy of another node", target)
