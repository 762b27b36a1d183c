"""How long a call reads again what another process replaces or removes meanwhile."""

from __future__ import annotations

import time

_LIMIT_S = 20.0
_ATTEMPTS_MIN = 3


class Again:
    """The limit of one call: a time, so that a loop within a loop adds to it.

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
