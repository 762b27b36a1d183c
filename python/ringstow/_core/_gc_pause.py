"""Pauses Python's garbage collector, which visits every object whenever many are made."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

# A threshold of new objects that no process reaches.
_NEVER = 2_000_000_011

# No lock: a thread that Ctrl-C interrupts while it releases a lock would block all other saves.
_holds: set[int] = set()
"""One number for each running block, in all threads."""
_usual = gc.get_threshold()
"""The thresholds to restore at the end of the last block."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Prevent Python's garbage collector from starting automatically.

    It starts after a number of new objects (several per tensor), and each run visits everything
    that the process has imported, which took longer than the copy. Loads pause it until they end,
    also while reading, since it would visit half-built objects.

    This raises that number, for all threads. It does not call ``gc.disable`` and ``gc.enable``:
    another thread may disable the collector meanwhile, and enabling would undo that. Thresholds
    that another thread sets meanwhile stay.
    """
    me = object()
    try:
        _begin(id(me))
        yield
    finally:
        try:
            _end(id(me))
        finally:  # Ctrl-C may have interrupted the first call
            _end(id(me))


def _begin(hold: int) -> None:
    global _usual
    _holds.add(hold)  # first, so that a block that ends now keeps the thresholds
    now = gc.get_threshold()
    if now[0] != _NEVER:
        _usual = now
        gc.set_threshold(_NEVER, *now[1:])


def _end(hold: int) -> None:
    _holds.discard(hold)
    if not _holds and gc.get_threshold()[0] == _NEVER:
        gc.set_threshold(*_usual)


def _forget() -> None:
    """In a forked child, end the blocks of threads that do not exist there."""
    _holds.clear()
    _end(0)


os.register_at_fork(after_in_child=_forget)
