"""Waits of calls: when they log the reason, and when they stop trying again.

This module never ends a wait for a disk or a rank. It logs the reason once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""After this time a wait logs its reason."""

# How long one call tries again if another process replaces or removes what it reads.
_LIMIT_S = 20.0
_ATTEMPTS_MIN = 3

_log = logging.getLogger("ringstow")


class Patience:
    """One wait that polls."""

    def __init__(self, what: str) -> None:
        """Begin to wait.

        Args:
            what: the reason, with a path: "a step waits for the save to run/step-1".
        """
        self._what = what
        self._since = time.monotonic()
        self._has_said = False

    def check(self) -> None:
        """Log the reason if it is time, and if it has not been logged."""
        if not self._has_said and time.monotonic() - self._since >= PATIENCE_S:
            self._has_said = True
            _say(self._what)


def patiently(wait: Callable[[float | None], object], what: str) -> None:
    """Wait without a time limit.

    Args:
        wait: waits a number of seconds, or until the end if None; returns whether it ended.
        what: the reason, for the log.
    """
    if not wait(PATIENCE_S):
        _say(what)
        wait(None)


@contextlib.contextmanager
def patient(what: str) -> Iterator[None]:
    """Log in another thread what a block waits for, since the block itself cannot."""
    timer = threading.Timer(PATIENCE_S, _say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    here = os.uname().nodename, os.getpid()
    _log.warning("%s, for %.0f s so far, on node %s in process %d", what, PATIENCE_S, *here)


class Again:
    """The time limit of a call that tries again if another process changes what it reads.

    It is a time, so that nested loops do not multiply it.

    A few attempts are always made, since a large checkpoint may take longer to load.
    """

    def __init__(self) -> None:
        """Start the time."""
        self._until = time.monotonic() + _LIMIT_S
        self._left = _ATTEMPTS_MIN

    def may_try(self) -> bool:
        """Return whether there is time for another attempt."""
        self._left -= 1
        return self._left > 0 or time.monotonic() < self._until
