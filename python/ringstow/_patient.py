"""Waits that say what they wait for, once, if that takes long: a disk may hang, or a rank be lost.

Nothing here ends a wait, or makes it longer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""After this time a wait says what it waits for."""

_log = logging.getLogger("ringstow")


class Patience:
    """One wait that polls."""

    def __init__(self, what: str) -> None:
        """Begin to wait.

        Args:
            what: who waits for what, with a path: "a step waits for the save to run/step-1".
        """
        self._what = what
        self._since = time.monotonic()
        self._has_said = False

    def check(self) -> None:
        """Say it now, if it is time, and has not been said."""
        if not self._has_said and time.monotonic() - self._since >= PATIENCE_S:
            self._has_said = True
            _say(self._what)


def patiently(wait: Callable[[float | None], object], what: str) -> None:
    """Wait as long as it takes.

    Args:
        wait: waits so many seconds, or as long as it takes; returns whether it is over.
        what: as in `Patience`.
    """
    if not wait(PATIENCE_S):
        _say(what)
        wait(None)


@contextlib.contextmanager
def patient(what: str) -> Iterator[None]:
    """Say in another thread what a block waits for, since the block itself cannot."""
    timer = threading.Timer(PATIENCE_S, _say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    _log.warning("%s, for %.0f s so far", what, PATIENCE_S)
