"""Names the ranks that have ended or hang in the last save of a training, in time for its end.

A collective that fails names no rank, and ranks that wait for one that hangs fail only after the
time-out of their group. It makes nobody wait as long as all ranks come.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringstow._core._errors import Error

# How long the ranks have for their answers if nothing limits the last save.
_ANSWER_S = 30.0
# Of the time that is left for the last save, the part that is kept for the answers, and its most.
_KEPT, _KEPT_S_MAX = 0.2, 10.0


class RollCall:
    """The ranks of a group; all of them make it together, while all are there.

    Args:
        group: a group of these ranks that nothing else uses. A collective that fails leaves its own
            group unusable.
        gathered: returns every rank's value.
    """

    def __init__(
        self, group: dist.ProcessGroup, gathered: Callable[[str], list[str]], rank: int
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self._rank = rank
        self._hosts = gathered(os.uname().nodename)
        self._peers = dist.get_process_group_ranks(group)
        self._lock = threading.RLock()
        self._until: float | None = None
        self._answered_by: float | None = None
        self._lost = ""
        self.is_on = False
        """Whether the last save has begun."""

    def begin(self, left_s: float | None) -> None:
        """Watch from now on; ``left_s`` is the time for the last save, None for no limit."""
        self.is_on = True
        if left_s is not None:
            now = time.monotonic()
            kept = min(_KEPT * left_s, _KEPT_S_MAX)
            self._until, self._answered_by = now + left_s - kept, now + left_s - kept / 2

    def left_s(self) -> float | None:
        """Return the limit of the next collective, in seconds; None for none.

        Raises:
            Error: a rank is known to be lost.
        """
        if self._lost:
            raise Error(self._lost)
        return None if self._until is None else max(self._until - time.monotonic(), 0.1)

    def call(self, doing: str) -> Error:
        """Return the error of a call in which a collective has failed; it names the lost ranks."""
        with self._lock:
            if not self._lost:
                missing = self._missing()
                named = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in missing)
                why = f"{named} does not answer" if missing else "a rank could not be reached"
                self._lost = (
                    f"the last save is not made: {why}, while rank {self._rank} of "
                    f"{len(self._peers)} waited in {doing or 'a save'}. The earlier checkpoint "
                    "stays"
                )
            return Error(self._lost)

    def _missing(self) -> list[int]:
        """Return the ranks that do not answer in time. All ranks that can call it."""
        until = time.monotonic() + _ANSWER_S if self._answered_by is None else self._answered_by
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        begun: dict[int, list[Any]] = {rank: [] for rank in others}
        missing = set()
        for begin in (dist.irecv, dist.isend):
            for rank in others:
                memory = torch.zeros(1, dtype=torch.uint8, device="cpu")
                try:
                    begun[rank].append(begin(memory, self._peers[rank], group=self.group))
                except RuntimeError:  # the connection is closed
                    missing.add(rank)
        for rank in others:
            for work in begun[rank]:
                left = max(until - time.monotonic(), 0.01)
                try:
                    if not work.wait(datetime.timedelta(seconds=left)):
                        missing.add(rank)
                except RuntimeError:
                    missing.add(rank)
        return sorted(missing)

    def end(self) -> None:
        """End the group."""
        group, self.group = self.group, None
        if group is None or not dist.is_initialized():
            return
        if self._lost:
            keep_forever(group)
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)


def keep_forever(group: dist.ProcessGroup) -> None:
    """Keep a process group in which a collective has begun whose other ranks may never come.

    gloo's destructor waits for them, and at the interpreter's exit ends the process by SIGABRT.
    """
    import ctypes  # slow, and only a failed training needs it

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
