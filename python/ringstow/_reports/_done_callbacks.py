"""Outcomes: one log line per save and load, and the callbacks of `on_done`.

Callbacks run in a thread of their own, one after the other. So they cannot block a save, and a
signal handler that saves cannot wait for a lock of the code that it interrupted. For the same
reason, nothing here waits for a lock outside that thread.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from ringstow._reports._io_reports import LoadReport, PromotionReport, SaveReport

_log = logging.getLogger("ringstow")

# How long the interpreter's exit waits for callbacks.
_EXIT_S = 5.0


Kind = Literal["save", "load", "promotion", "skip"]
"""The kind of operation. A promotion is the copy of a checkpoint to one tier, a skip is a save that
``on_busy="skip"`` skips."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a save, load or promotion: a report, or an error."""

    kind: Kind
    """The kind of operation."""
    path: str
    """The checkpoint's directory."""
    step: int | None = None
    """The ``step`` given to the save; for a promotion, the checkpoint's, or None if it failed."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """The ``metrics`` given to the save; empty if it failed."""
    to: str | None = None
    """Where a promotion copies to."""
    report: SaveReport | LoadReport | PromotionReport | None = None
    """The report; None if it failed."""
    error: BaseException | None = None
    """The error; None if it succeeded."""


Callback = Callable[[Outcome], object]


class Listener:
    """A callback of `on_done`, until `remove` or the end of a ``with`` block."""

    def __init__(self, callback: Callback, kinds: frozenset[str]) -> None:
        self._callback = callback
        self._kinds = kinds
        self._has_failed = False

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "" if self in _listeners else ", removed"
        return f"<ringstow.Listener {self._callback!r}{state}>"

    def remove(self) -> None:
        """Wait until the callback has returned for all earlier outcomes, then remove it.

        Within a callback this does not wait. Further calls do nothing.
        """
        if self in _listeners:
            flush()
            with contextlib.suppress(ValueError):  # another thread removed it meanwhile
                _listeners.remove(self)

    def _call(self, outcome: Outcome) -> None:
        if outcome.kind not in self._kinds:
            return
        try:
            self._callback(outcome)
        except BaseException as error:  # also SystemExit: the thread continues
            if not self._has_failed:
                self._has_failed = True
                with _logging():
                    _log.error(
                        "the callback %r of ringstow.on_done failed: %s; its further failures are "
                        "not logged",
                        self._callback,
                        error,
                        exc_info=error,
                    )


def on_done(callback: Callback, *, kinds: Iterable[Kind] = ("save", "load")) -> Listener:
    """Call a function after each save and load of this process, also after those that fail.

    Covers `save`, `save_async`, `load`, `load_into`, and a rank's write and read by
    ``ringstow.dcp``, whose failed commit counts as a failed save of the coordinator. Does not cover
    reads of an opened checkpoint, `verify` and conversions.

    Callbacks run in a thread of their own, in the order in which saves and loads end. A save never
    waits for them, and they cannot make it fail: an exception is logged once. The interpreter's
    exit waits for them, for at most 5 s. A forked child has no callbacks.

    Args:
        callback: called with the `Outcome`.
        kinds: the operations after which to call it. ``"promotion"`` is for `promote` and for each
            copy to a tier, once per attempt. ``"skip"`` is for a manager's saves that
            ``on_busy="skip"`` skips.

    Returns:
        The listener, whose ``remove()`` ends the calls. It is a context manager, too.

    Raises:
        ValueError: an unknown kind, or none.
    """
    wanted = frozenset([kinds] if isinstance(kinds, str) else kinds)
    if not wanted or not wanted <= {*get_args(Kind)}:
        raise ValueError(f"kinds are {', '.join(get_args(Kind))}, not {sorted(wanted)}")
    listener = Listener(callback, wanted)
    _listeners.append(listener)
    return listener


# Changes to lists and deques are atomic, so they need no lock. A lock could be held by the thread
# that a signal handler interrupts.
_listeners: list[Listener] = []
notes: list[Callable[[Outcome], None]] = []
"""Functions called at once, before the caller gets the outcome. Must be fast and not raise."""
_Item = tuple[Outcome, list[Listener]] | str | threading.Event
_queue: collections.deque[_Item] = collections.deque()
"""The thread's queue: callbacks to call, log lines, and events to set."""
_busy = threading.Lock()
"""Held while the thread runs. No thread waits for it."""
_worker: int | None = None


@contextlib.contextmanager
def failing(
    kind: Kind, path: str, step: int | None = None, *, to: str | None = None
) -> Iterator[None]:
    """Pass a failure on to the callbacks."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        tell(Outcome(kind=kind, path=path, step=step, to=to, error=error))
        raise


def tell(outcome: Outcome) -> None:
    """Queue an outcome for the callbacks. Returns at once, after calling immediate listeners."""
    for note in notes:
        note(outcome)
    if _listeners:
        _enqueue((outcome, list(_listeners)))


def log(line: str) -> None:
    """Log a line at level INFO."""
    with _logging():
        _log.info("%s", line)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Report the failure of a logging handler as unraisable: the save has succeeded."""
    try:
        yield
    except Exception as error:
        _WhileLogging(error)


class _WhileLogging:
    """Raises an error when it is dropped, where no code catches it.

    So the interpreter itself calls `sys.unraisablehook`: its default hook refuses other callers.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def log_apart(line: str) -> None:
    """Log a line from the thread of the callbacks, unless this is the main thread.

    For a thread that others wait for: a signal handler in the main thread may wait for it while it
    holds the lock of a logging handler.
    """
    if threading.current_thread() is threading.main_thread():
        log(line)
    elif _log.isEnabledFor(logging.INFO):
        _enqueue(line)


def flush(timeout: float | None = None) -> bool:
    """Wait until everything queued before is done; return whether it is.

    Returns at once in the thread of the callbacks.
    """
    if _worker == threading.get_ident() or not (_queue or _busy.locked()):
        return True
    reached = threading.Event()
    _enqueue(reached)
    return reached.wait(timeout)


def end() -> None:
    """At the interpreter's exit, wait for the callbacks, for a bounded time."""
    if not flush(_EXIT_S):
        _log.warning(
            "a callback of ringstow.on_done has not returned after %.0f s; exiting without it",
            _EXIT_S,
        )


def forget_after_fork() -> None:
    """In a forked child, drop the parent's callbacks and queue: their thread does not exist."""
    global _queue, _busy, _worker
    _listeners.clear()
    notes.clear()
    _queue, _busy, _worker = collections.deque(), threading.Lock(), None


def _enqueue(item: _Item) -> None:
    _queue.append(item)
    if _busy.acquire(blocking=False):
        try:
            # Not threading.Thread, whose start takes a lock that an interrupted thread may hold.
            _thread.start_new_thread(_work, ())
        except RuntimeError:  # no more threads, or the interpreter is exiting
            _work()


def _work() -> None:
    """Process the queue, and end."""
    global _worker
    while True:
        _worker = threading.get_ident()
        with contextlib.suppress(IndexError):
            while True:
                _do(_queue.popleft())
        _worker = None
        _busy.release()
        # Process entries queued between the last check and the release.
        if not _queue or not _busy.acquire(blocking=False):
            return


def _do(item: _Item) -> None:
    if isinstance(item, threading.Event):
        item.set()
    elif isinstance(item, str):
        log(item)
    else:
        outcome, listeners = item
        for listener in listeners:
            if listener in _listeners:  # not removed since
                listener._call(outcome)
