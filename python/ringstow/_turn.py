"""Who may call a `CheckpointManager`: its own process, one call at a time, until it is closed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from ringstow._errors import BusyError, Error, InvalidStateError


class Turn:
    """Lets one call after the other into a manager."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant: a signal handler must get an error
        self._is_taken = False
        self.is_closed = False

    def is_own(self) -> bool:
        """Return whether this process made the manager."""
        return self._pid == os.getpid()

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Run one call; another thread's waits until it ends.

        Raises:
            BusyError: a signal handler has interrupted another call of this thread.
            InvalidStateError: the manager is closed.
            Error: this process was forked from the manager's.
        """
        self._check()
        with self._lock:
            if self._is_taken:
                raise BusyError(
                    f"manager.{name}() was called within another call of the manager of "
                    f"{self._root}, by a signal handler: let the handler set a flag, and call the "
                    "manager after the step",
                    path=self._root,
                )
            self._check()  # another thread may have closed it meanwhile
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False

    def _check(self) -> None:
        if not self.is_own():
            raise Error(
                f"the manager of {self._root} belongs to process {self._pid}, and this process was "
                "forked from that one: make a CheckpointManager here"
            )
        if self.is_closed:
            raise InvalidStateError(
                f"the manager of {self._root} is closed: call it within its `with` block, or make "
                "another"
            )
