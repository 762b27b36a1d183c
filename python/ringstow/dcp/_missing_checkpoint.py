"""Detects that no rank of a load sees the checkpoint, so that no rank waits for it.

The waiting ranks count themselves in the store of the default process group.
"""

from __future__ import annotations

import collections
import threading
from typing import Self

import torch.distributed as dist

from ringstow.dcp import _private

_KEY = "ringstow.dcp/absent"

_lock = threading.RLock()  # re-entrant: a signal handler may save, too
_looks: collections.Counter[str] = collections.Counter()
"""How often this process has searched for each checkpoint; equal on ranks that load together."""


class Absence:
    """The count of ranks of one load that do not see the checkpoint."""

    def __init__(self, path: str, kind: str) -> None:
        """Begin to search for a checkpoint, on every rank.

        Args:
            path: the checkpoint's directory.
            kind: the kind of checkpoint. A rank that finds one kind does not search for the next,
                so the ranks agree only on how often they searched for the same kind.
        """
        self._ranks = _private.load_ranks()
        name = f"{kind}/{path}"
        if dist.is_available() and dist.is_initialized() and self._size() < dist.get_world_size():
            name = f"{self._ranks}/{name}"  # another group may load the same path
        with _lock:
            _looks[name] += 1
            self._key = f"{_KEY}/{_looks[name]}/{name}"
        self._is_counted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Withdraw this rank's count, for ranks that are out of step with it."""
        if self._is_counted:
            self._add(-1)

    def is_everywhere(self) -> bool:
        """Note that this rank does not see the checkpoint; return whether no rank does."""
        if not (dist.is_available() and dist.is_initialized()) or self._size() == 1:
            return True
        count = self._add(0 if self._is_counted else 1)
        is_everywhere = count is not None and count >= self._size()
        self._is_counted = not is_everywhere  # a full count stays: the other ranks must see it too
        return is_everywhere

    def _size(self) -> int:
        return dist.get_world_size() if self._ranks is None else len(self._ranks)

    def _add(self, number: int) -> int | None:
        try:
            return _private.group_count(self._key, number)
        except Exception:  # the store does not answer
            return None
