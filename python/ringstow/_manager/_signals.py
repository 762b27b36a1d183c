"""Signals that end a training: the handler only notes them, and `Schedule` asks later.

It never saves, logs or waits in a handler.
"""

from __future__ import annotations

import os
import signal
import threading
import types
import weakref
from collections.abc import Callable, Mapping

from ringstow._core._errors import InvalidStateError

# A launcher and the cluster may both send the same notice: torchrun forwards what Slurm has sent to
# the workers, too.
SAME_NOTICE_S = 1.0

_Previous = Callable[[int, types.FrameType | None], object] | int | None


class Notices:
    """The signals that have arrived."""

    def __init__(
        self, graces: Mapping[signal.Signals, float | None], clock: Callable[[], float]
    ) -> None:
        """Handle signals.

        Args:
            graces: the signals, each with the seconds until a kill; None means that none comes.
            clock: returns seconds.

        Raises:
            InvalidStateError: this is not the main thread.
        """
        if graces and threading.current_thread() is not threading.main_thread():
            raise InvalidStateError(
                "OnSignal needs the main thread, since Python sets signal handlers only there: "
                "make the manager in the main thread, or use Every or Before in place of OnSignal"
            )
        self._graces = graces
        self.clock = clock
        self.noted: dict[int, float] = {}
        """When each signal that has arrived came first, in seconds of the clock."""
        self.is_open = True
        self._handlers = {number: _Handler(self, number) for number in graces}

    def left_s(self) -> float | None:
        """Return the seconds until the kill, infinite if none comes; None without a signal."""
        left, now = None, self.clock()
        for number, since in list(self.noted.items()):
            grace = self._graces.get(signal.Signals(number))  # `Schedule.note` may note others
            own = float("inf") if grace is None else grace - (now - since)
            left = own if left is None else min(left, own)
        return left

    def close(self) -> None:
        """Restore the handlers that were there before."""
        self.is_open = False
        for number, handler in self._handlers.items():
            # Another one may have been set since, which calls this one.
            current: object = signal.getsignal(number)
            if current is handler:
                handler.restore()


class _Handler:
    """The handler of one signal. It does not keep its notices alive."""

    def __init__(self, notices: Notices, number: signal.Signals) -> None:
        self._notices = weakref.ref(notices)
        self._number = number
        self._pid = os.getpid()
        self._previous: _Previous = signal.signal(number, self)

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        notices = self._notices()
        if notices is None or not self.is_alive():
            self._pass_on(frame)
            return
        now = notices.clock()
        if now - notices.noted.setdefault(number, now) > SAME_NOTICE_S:
            self._end(frame)
            return
        previous = _alive(self._previous)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def is_alive(self) -> bool:
        """Return whether its manager is open: not in a forked child, nor after its end."""
        notices = self._notices()
        return notices is not None and notices.is_open and os.getpid() == self._pid

    def restore(self) -> None:
        """Restore the handler that was there before, unless Python cannot."""
        in_main = threading.current_thread() is threading.main_thread()
        previous = _alive(self._previous)
        if in_main and previous is not None:  # None: a library set it, not Python
            signal.signal(self._number, previous)

    def _pass_on(self, frame: types.FrameType | None) -> None:
        previous = _alive(self._previous)
        if callable(previous):
            previous(self._number, frame)
        elif previous != signal.SIG_IGN:
            self._end(frame)

    def _end(self, frame: types.FrameType | None) -> None:
        """End the process as the signal does by default."""
        if self._number == signal.SIGINT:
            signal.default_int_handler(self._number, frame)
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)


def _alive(handler: _Previous) -> _Previous:
    """Return a handler, or the one before it if its manager has ended: that one handles nothing."""
    while isinstance(handler, _Handler) and not handler.is_alive():
        handler = handler._previous
    return handler
