"""How long a save holds up the program that makes it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_call = threading.local()
"""Of each thread, when a manager's call began that has waited for the save before."""


@contextlib.contextmanager
def counted_since(begun: float) -> Iterator[None]:
    """Have saves that begin within count what this thread waited since a time of perf_counter."""
    _call.begun = begun
    try:
        yield
    finally:
        del _call.begun


class Waited:
    """Measures how long each thread waits for one save.

    Threads that wait at the same time lose that time once, so their waits do not add up: what the
    save has cost is what the thread lost that waited longest.
    """

    def __init__(self) -> None:
        # By thread: the seconds of the waits that have ended, and when that in progress began. One
        # assignment changes both, so that another thread reads neither too much nor too little.
        self._threads: dict[int, tuple[float, float | None]] = {}
        begun: float | None = getattr(_call, "begun", None)
        if begun is not None:
            self._threads[threading.get_ident()] = (time.perf_counter() - begun, None)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Count the time within as a wait of this thread."""
        me = threading.get_ident()
        before, since = self._threads.get(me, (0.0, None))
        if since is not None:  # within another wait, which counts already
            yield
            return
        since = time.perf_counter()
        self._threads[me] = (before, since)
        try:
            yield
        finally:
            self._threads[me] = (before + time.perf_counter() - since, None)

    def seconds(self) -> float:
        """Return the wait of the thread that has waited longest, including waits in progress."""
        now = time.perf_counter()
        waits = list(self._threads.values())
        return max(
            (ended + (0.0 if since is None else now - since) for ended, since in waits), default=0.0
        )
