"""Copies of a manager's steps, in the background, once they are committed.

The native side decides which step to copy next, and which to try again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _native
from ringstow._core._errors import BusyError, NoCheckpointError
from ringstow._core._waiting import patiently

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringstow._reports._io_reports import PromotionReport

_log = logging.getLogger("ringstow")


class Added(NamedTuple):
    """A step to copy."""

    path: str
    is_new: bool
    """Whether the step was just saved, instead of found in the directory."""


Stays = tuple[bool, bool, int | None]
"""Which steps are always copied: whether a rule removes steps, whether it removes them once all
tiers have them, and which numbers stay for good."""

_PAUSES_S = _native.COPY_PAUSES_S


class Copier:
    """Copies steps in a thread, one after the other.

    If a newer step is added before a copy has begun, the older step is not copied, unless it must
    stay for good. A copy that has begun continues, even if the step is removed meanwhile. A failed
    copy is tried again, with longer and longer pauses, until a newer step replaces it or `close`
    has tried it a last time.
    """

    _agree: Callable[[int, bool], tuple[int, bool]] | None = None
    """How many steps all ranks have added, and whether one is closing; None for one process."""

    def __init__(self, places: Iterable[str], stays: Stays = (True, False, None)) -> None:
        """Store the places to copy to; without places, nothing is copied."""
        self._places = " and ".join(places)
        self._line = _native.CopyLine(*stays, self._agree is not None)
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too
        self._ended: dict[str, list[Future[bool]]] = {}
        """The future of each copy's outcome, by path. The first try of a copy decides."""
        self._errors: dict[str, BaseException] = {}
        """Why copies failed, by path, since the last step was saved."""
        self.report: PromotionReport | None = None
        """The report of the last copy to a store."""
        self.error: BaseException | None = None
        """Why a copy failed; None once all went well."""

    def add(self, path: str, *, is_new: bool, ended: Future[bool] | None = None) -> None:
        """Copy a step as soon as the copy in progress has ended.

        Args:
            path: the step's directory.
            is_new: whether it was just saved.
            ended: a future that is set to whether all copies exist; False if a newer step came
                first.
        """
        if not self._places:
            return
        if ended is not None:
            with self._lock:
                self._ended.setdefault(path, []).append(ended)
        if not self._line.add(path, is_new):
            return
        if threading.main_thread().is_alive():
            try:
                # The interpreter's exit waits for this thread.
                threading.Thread(target=self._work, name="ringstow-copies", daemon=False).start()
            except RuntimeError as error:  # there can be no more threads
                self._give_up(error)
            return
        self._work()  # the interpreter is exiting, and does not wait for new threads

    @property
    def has_places(self) -> bool:
        """Whether it copies anything."""
        return bool(self._places)

    def add_found(self, path: str) -> None:
        """Copy a step that was not just saved, unless it is already queued."""
        self.add(path, is_new=False)

    def waiting(self) -> list[str]:
        """Return the paths of the steps that are queued or being copied."""
        return self._line.waiting()

    def rescue(self, path: str, ended: Future[bool] | None = None) -> None:
        """Copy a committed step that may not survive a crash of this machine."""
        if self._places:
            _log.warning("%s may not survive a crash: copying it to %s", path, self._places)
        self.add(path, is_new=False, ended=ended)

    def expected(self) -> Future[bool] | None:
        """Return a future for `add`; None if it copies nothing."""
        from concurrent.futures import Future  # a slow import that only handles need

        return Future() if self._places else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all copies; return whether they ended in time and the last one succeeded.

        Does not wait for further tries of a failed copy.
        """
        if timeout is None:
            self._await(self._line.wait_idle)
        return self._line.wait_idle(timeout) and self.error is None

    def _await(self, wait: Callable[[float | None], bool]) -> None:
        left = self._line.waiting()
        patiently(wait, f"the program waits for the copy of {left[0] if left else 'a step'}")

    def close(self) -> None:
        """Wait until nothing is left to copy, and try a failed copy a last time."""
        self.end_retries()
        self._await(self._line.wait_ended)

    def end_retries(self) -> None:
        """Try a failed copy a last time, now, without waiting."""
        self._line.end_retries()

    def pause_s(self) -> float | None:
        """Return after how many seconds to try the failed copy again; None means never."""
        return self._line.pause_s(_PAUSES_S) if self._may_repeat() else None

    def _may_repeat(self) -> bool:
        """Return whether to try the copy that just ended again."""
        return passes(self.error)

    def _is_left(self, step: Added) -> bool:
        """Return whether a step can still be copied."""
        return os.path.lexists(step.path)

    def _work(self) -> None:
        try:
            while self._take_turn():
                pass
        except BaseException as error:
            self._give_up(error)

    def _take_turn(self) -> bool:
        """Copy the next step; return False if there is none."""
        step, overtaken, is_fresh = self._line.next(_PAUSES_S, self._agree, _is_exiting)
        if is_fresh:
            self._errors, self.error = {}, None
        for path in overtaken:
            self._pass_over(path)
            self._tell_end(path, is_there=False)
        if step is None:
            return False
        added = Added(*step)
        is_again = self._try(added) and self._is_left(added)
        self.error = next(iter(self._errors.values()), None)
        self._line.ended(is_again)
        return True

    def _try(self, step: Added) -> bool:
        """Copy a step; return whether to try it again."""
        with self._lock:
            ended = self._ended.pop(step.path, [])
        self._errors.pop(step.path, None)
        self.error = None
        try:
            is_there = self._copy(step)
        except BaseException as error:
            _set(ended, is_there=False, error=error)
            raise
        if self.error is not None:
            self._errors[step.path] = self.error
        _set(ended, is_there=is_there, error=self.error)
        return self._may_repeat()

    def _copy(self, step: Added) -> bool:
        """Copy a step; put a failure into ``error``. Return False if it was not copied."""
        raise NotImplementedError

    def _pass_over(self, path: str, place: str | None = None) -> None:
        _log.warning(
            "%s is not copied to %s: a newer step was saved before its copy was complete, and "
            "comes first",
            path,
            place or self._places,
        )

    def _tell_end(self, path: str, *, is_there: bool, error: BaseException | None = None) -> None:
        with self._lock:
            ended = self._ended.pop(path, [])
        _set(ended, is_there=is_there, error=error)

    def _give_up(self, error: BaseException) -> None:
        """Copy none of the steps that were added."""
        given_up = self._line.waiting()
        self.error = error
        for path in list(self._ended):
            self._tell_end(path, is_there=False, error=error)
        self._line.give_up()
        for path in given_up:
            _log.error("%s is saved, but not copied to %s: %s", path, self._places, error)


def passes(error: BaseException | None) -> bool:
    """Return whether a copy that failed with this error may succeed later."""
    # Without a checkpoint, there is nothing to copy.
    is_absent = isinstance(error, NoCheckpointError)
    return isinstance(error, (OSError, BusyError)) and not is_absent


def _is_exiting() -> bool:
    """Return whether the interpreter's exit waits for the thread."""
    return not threading.main_thread().is_alive()


def _set(ended: list[Future[bool]], *, is_there: bool, error: BaseException | None = None) -> None:
    for one in ended:
        if error is None:
            one.set_result(is_there)
        else:
            one.set_exception(error)
