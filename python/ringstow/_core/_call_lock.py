"""One call at a time, and an error for a signal handler that makes a call during another.

The handler runs in the thread whose call it interrupts, so it must never wait for that call's end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import BusyError, Error, InvalidStateError
from ringstow._core._waiting import Patience

# How often a call that waits for another call polls.
_POLL_S = 0.01


class CallLock:
    """A lock of calls that another thread may end, for which a signal handler never waits."""

    def __init__(self, call: str) -> None:
        """Make an unlocked lock.

        Args:
            call: the name of the calls that take it, for the error.
        """
        self._call = call
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        """The threads that wait for the lock or hold it, and whose call has not returned."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for one call.

        Raises:
            BusyError: a signal handler has interrupted another call of this thread.
        """
        self._enter()
        try:
            self._await()
            with self._lock:
                yield
        finally:
            self.hand_over()

    def acquire(self) -> None:
        """Take the lock. Then `release` it, or `hand_over` the release to another thread.

        Raises:
            BusyError: a signal handler has interrupted another call of this thread.
        """
        self._enter()
        try:
            self._await()
            self._lock.acquire()
        except BaseException:
            self.hand_over()
            raise

    def hand_over(self) -> None:
        """Leave the release to another thread, since this thread's call returns."""
        self._inside.discard(threading.get_ident())

    def release(self) -> None:
        """Release the lock for the next call."""
        self.hand_over()
        self._lock.release()

    def _await(self) -> None:
        """Wait until the lock seems free, and log the reason if that takes long. Takes no lock."""
        patience = Patience(f"{self._call} waits for another one of this process")
        while self._lock.locked():
            patience.check()
            time.sleep(_POLL_S)

    def _enter(self) -> None:
        me = threading.get_ident()
        if me in self._inside:
            raise BusyError(
                f"{self._call} was called within another such call, by a signal handler: let the "
                "handler set a flag, and make the call after the step"
            )
        self._inside.add(me)


class Turn:
    """Lets one call at a time into a manager."""

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
        """Run one call; calls of other threads wait until it ends.

        Raises:
            BusyError: a signal handler has interrupted another call of this thread.
            InvalidStateError: the manager is closed.
            Error: this process was forked from the manager's.
        """
        self.check()
        with self._lock:
            if self._is_taken:
                raise BusyError(
                    f"manager.{name}() was called within another call of the manager of "
                    f"{self._root}, by a signal handler: let the handler set a flag, and call the "
                    "manager after the step",
                    path=self._root,
                )
            self.check()  # another thread may have closed it meanwhile
            self._is_taken = True
            try:
                with real_tensors():
                    yield
            finally:
                self._is_taken = False

    def check(self) -> None:
        """Raise unless this process may call the manager, which is open.

        Raises:
            InvalidStateError: the manager is closed.
            Error: this process was forked from the manager's.
        """
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
