"""Python's garbage collector, which visits every object whenever many are made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

# More new objects than a process ever makes before the collector would start.
_NEVER = 2_000_000_011

_lock = threading.RLock()  # re-entrant: a signal handler may save, too
_holds: set[int] = set()
"""One number for each block that is running, in all threads."""
_before: tuple[int, int, int] | None = None
"""The thresholds to put back at the end of the last block."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from starting by itself.

    It starts after a number of new objects (each tensor is a few), and each run visits everything
    that the process has imported: that took longer than the copy. Loads pause it to their end,
    reading included, since it would visit what they have half made.

    This raises that number, for all threads. It does not call ``gc.disable`` and ``gc.enable``:
    another thread may disable the collector meanwhile, for good, and nothing would tell. Thresholds
    that another thread sets meanwhile stay.
    """
    me = object()
    try:
        _begin(id(me))
        yield
    finally:
        try:
            _end(id(me))
        finally:  # Ctrl-C may have cut the first call short
            _end(id(me))


def _begin(hold: int) -> None:
    global _before
    with _lock:
        _holds.add(hold)
        now = gc.get_threshold()
        if now[0] != _NEVER and _before is None:
            _before = now
            gc.set_threshold(_NEVER, *now[1:])


def _end(hold: int) -> None:
    global _before
    with _lock:
        _holds.discard(hold)
        if _holds or _before is None:
            return
        if gc.get_threshold()[0] == _NEVER:
            gc.set_threshold(*_before)
        _before = None  # last: Ctrl-C may come between the two


def _forget() -> None:
    """In a forked child, where the threads that had begun these blocks never end them."""
    global _lock
    _lock = threading.RLock()
    _holds.clear()
    _end(0)


os.register_at_fork(after_in_child=_forget)
