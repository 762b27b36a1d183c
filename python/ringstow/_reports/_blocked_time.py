"""Measures how long a save blocks the program."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_call = threading.local()
"""For each thread, when the manager's call began that waited for the previous save."""


@contextlib.contextmanager
def counted_since(begun: float) -> Iterator[None]:
    """Count this thread's wait since a time of perf_counter for saves that begin in the block."""
    _call.begun = begun
    try:
        yield
    finally:
        del _call.begun


class Waited:
    """Measures how long each thread waits for one save.

    Threads that wait at the same time lose that time once, so their waits do not add up: the cost
    of the save is the longest wait of a thread.
    """

    def __init__(self) -> None:
        # By thread: the seconds of finished waits, and the start of the current one. One assignment
        # changes both, so that another thread reads a consistent pair.
        self._threads: dict[int, tuple[float, float | None]] = {}
        begun: float | None = getattr(_call, "begun", None)
        if begun is not None:
            self._threads[threading.get_ident()] = (time.perf_counter() - begun, None)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Count the time within as a wait of this thread."""
        me = threading.get_ident()
        before, since = self._threads.get(me, (0.0, None))
        if since is not None:  # inside another wait, which is already counted
            yield
            return
        since = time.perf_counter()
        self._threads[me] = (before, since)
        try:
            yield
        finally:
            self._threads[me] = (before + time.perf_counter() - since, None)

    def seconds(self) -> float:
        """Return the longest wait of any thread, including waits in progress."""
        now = time.perf_counter()
        waits = list(self._threads.values())
        return max(
            (ended + (0.0 if since is None else now - since) for ended, since in waits), default=0.0
        )
