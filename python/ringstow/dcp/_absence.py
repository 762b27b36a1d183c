"""Whether any rank of a load sees the checkpoint: if none does, there is nothing to wait for.

The ranks count in the store of the default process group. A load in another group is never counted
in full, and its ranks wait as long as they may.
"""

from __future__ import annotations

import collections
import threading

import torch.distributed as dist

from ringstow.dcp import _private

_KEY = "ringstow.dcp/absent"

_lock = threading.Lock()
_loads: collections.Counter[str] = collections.Counter()
"""Loads that this process has begun, by path: each rank has the same number."""


class Absence:
    """What the ranks of one load say about the checkpoint's absence."""

    def __init__(self, path: str) -> None:
        """Begin a load of a path; every rank makes one."""
        with _lock:
            _loads[path] += 1
            self._key = f"{_KEY}/{_loads[path]}/{path}"
        self._is_counted = False

    def is_everywhere(self) -> bool:
        """Note that this rank does not see the checkpoint; tell whether no rank does."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return True
        count = self._add(0 if self._is_counted else 1)
        self._is_counted = True
        return count is not None and count >= dist.get_world_size()

    def ended(self) -> None:
        """Note that this rank sees the checkpoint."""
        if self._is_counted:
            self._is_counted = False
            self._add(-1)

    def _add(self, number: int) -> int | None:
        try:
            return _private.group_count(self._key, number)
        except Exception:  # the store does not answer
            return None
