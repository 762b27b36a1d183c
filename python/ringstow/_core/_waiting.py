"""How long a call waits: when it says what for, and when it no longer tries again.

A wait for a disk or a rank is never ended here. It says once what it waits for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""After this time a wait says what it waits for."""

# How long one call reads again what another process replaces or removes meanwhile.
_LIMIT_S = 20.0
_ATTEMPTS_MIN = 3

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


class Again:
    """The limit of a call that reads again what another process replaces or removes meanwhile.

    It is a time, so that a loop within a loop adds to it and does not multiply it.

    A few attempts are made however long they take: a large checkpoint may take longer to load.
    """

    def __init__(self) -> None:
        """Start the time."""
        self._until = time.monotonic() + _LIMIT_S
        self._left = _ATTEMPTS_MIN

    def may_try(self) -> bool:
        """Whether there is time for another attempt."""
        self._left -= 1
        return self._left > 0 or time.monotonic() < self._until
