"""Whether any rank of a load sees the checkpoint: if none does, there is nothing to wait for.

The ranks that wait count themselves in the store of the default process group.
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
"""How often this process has looked for each checkpoint: ranks that load together agree on it."""


class Absence:
    """What the ranks of one load say about the checkpoint's absence."""

    def __init__(self, path: str, kind: str) -> None:
        """Begin to look for a checkpoint; every rank does.

        Args:
            path: its directory.
            kind: what is looked for. A rank that finds one kind does not look for the next, so the
                ranks agree only on how often they looked for the same kind.
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
        """Note that this rank no longer waits, for ranks that are out of step with it."""
        if self._is_counted:
            self._add(-1)

    def is_everywhere(self) -> bool:
        """Note that this rank does not see the checkpoint; tell whether no rank does."""
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
