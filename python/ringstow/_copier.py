"""Copies of a manager's steps, in the background, once they are committed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringstow._errors import (
    BusyError,
    IncompleteCheckpointError,
    MissingFilesError,
    NoCheckpointError,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringstow._report import PromotionReport

_log = logging.getLogger("ringstow")


class Added(NamedTuple):
    """A step to copy."""

    path: str
    is_new: bool
    """Whether it was just saved, and not restored."""
    ended: Future[bool] | None
    """Becomes whether all copies are there: False if a newer step came first. The first try of a
    copy decides."""


_PAUSES_S = (30.0, 900.0)
"""The pause before a copy that failed is tried again, and the longest one."""


class Copier:
    """Copies steps in a thread, the newest first.

    A step that a newer one overtakes before its copy has begun is passed over. A copy that has
    begun goes on, also if the step is removed meanwhile. One that failed is tried again, with
    longer and longer pauses, until a newer step comes or `close` has tried it a last time.
    """

    joined: str | None = None
    """The run whose steps training goes on with, until the first copy."""
    _ends_with_program = True
    """Whether the exit of the program ends a copy; otherwise it waits for it."""
    _repeats = False
    """Whether a copy that failed is tried again."""

    def __init__(self, places: Iterable[str]) -> None:
        """Name where the copies are; without a name, nothing is copied."""
        self._places = " and ".join(places)
        self._changed = threading.Condition()
        self._added: list[Added] = []
        self._done = 0
        """How many of those are copied, or passed over."""
        self._is_running = False
        self._is_resting = False
        """Whether the thread waits before it tries a copy again."""
        self._is_closing = False
        self._tries = 0
        """How often the last step was tried again."""
        self._tried = 0
        """Up to which of them one was tried."""
        self.report: PromotionReport | None = None
        """What the last copy to a store did."""
        self.error: BaseException | None = None
        """Why the last copy failed; None after one that went well."""

    def add(
        self,
        path: str,
        *,
        is_new: bool,
        ended: Future[bool] | None = None,
    ) -> None:
        """Copy a step as soon as the copy in progress has ended, which ``ended`` becomes."""
        if not self._places:
            return
        with self._changed:
            self._added.append(Added(path, is_new, ended))
            if self._is_running:
                self._changed.notify_all()
                return
            ends = self._ends_with_program
            try:
                threading.Thread(target=self._work, name="ringstow-copies", daemon=ends).start()
            except RuntimeError as error:  # there can be no more threads
                self._give_up(error)
            else:
                self._is_running = True

    def expected(self) -> Future[bool] | None:
        """Return what `add` is to be given; None if it copies nothing."""
        from concurrent.futures import Future  # takes a while, and only handles need it

        return Future() if self._places else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to copy; return whether that is so, and the last copy good.

        Does not wait for another try of a copy that failed.
        """
        with self._changed:
            is_over = self._changed.wait_for(self._is_over, timeout)
            return is_over and self.error is None

    def wait_and_forget(self, timeout: float | None) -> bool:
        """Wait as `wait` does; the next call does not tell of the same failure."""
        with self._changed:
            is_good = self.wait(timeout)
            if not self._is_running:
                self.error = None
            return is_good

    def _is_over(self) -> bool:
        rests = self._is_resting and len(self._added) == self._done
        return rests or not self._is_running

    def close(self) -> None:
        """Wait until nothing is left to copy, and try a copy that failed a last time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_running)

    def pause_s(self) -> float | None:
        """Return after how many seconds the copy that just failed is tried again; None if never."""
        error = self.error
        passes = isinstance(error, (OSError, BusyError))
        if not (passes and self._repeats) or self._is_closing:
            return None
        first, longest = _PAUSES_S
        return min(first * 2.0 ** min(self._tries, 20), longest)

    def _rest(self) -> bool:
        """Wait before the last step is tried again; return whether to go on."""
        pause = self.pause_s()
        if pause is None or not os.path.lexists(self._added[-1].path):
            return False
        self._is_resting = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._is_closing or len(self._added) > self._done, pause)
        self._is_resting = False
        if len(self._added) == self._done:
            self._done -= 1
            self._tries += 1
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                if len(self._added) == self._done and not self._rest():
                    self._is_running = False
                    self._changed.notify_all()
                    return
                added = len(self._added)
            newest = self._newest(added)
            if newest is None:
                continue
            step = self._added[newest - 1]
            for passed in self._added[self._done : newest - 1]:
                self._pass_over(passed)
                _set(passed, is_there=False)
            if newest > self._tried:
                self._tries = 0
            self._tried = self._done = newest
            self.error = None
            is_there = self._copy(step)
            _set(step, is_there=is_there, error=self.error)

    def _newest(self, added: int) -> int | None:
        """Return up to which of so many added steps to go; None after giving up."""
        return added

    def _copy(self, step: Added) -> bool:
        """Copy a step; put a failure into ``error``. Return False if it was passed over."""
        raise NotImplementedError

    def _pass_over(self, step: Added, place: str | None = None) -> None:
        _log.warning(
            "%s is not copied to %s: another one is newer, and the copies are slower than the "
            "saves",
            step.path,
            place or self._places,
        )

    def _is_overtaken(self, step: Added, error: BaseException) -> bool:
        """Whether a step was removed after a newer one was added, and the copy failed by that."""
        gone = FileNotFoundError, NoCheckpointError, IncompleteCheckpointError, MissingFilesError
        is_gone = isinstance(error, gone) or not os.path.lexists(step.path)
        return len(self._added) > self._done and is_gone

    def _give_up(self, error: BaseException) -> None:
        """Copy none of the steps that were added."""
        with self._changed:
            given_up = self._added[self._done :]
            self._done = len(self._added)
            self.error = error
        for step in given_up:
            _set(step, is_there=False, error=error)
        path = self._added[-1].path
        _log.error("%s is saved, but not copied to %s: %s", path, self._places, error)


def _set(step: Added, *, is_there: bool, error: BaseException | None = None) -> None:
    if step.ended is None or step.ended.done():  # a copy that is tried again
        return
    if error is None:
        step.ended.set_result(is_there)
    else:
        step.ended.set_exception(error)
