"""Copies of a manager's steps, in the background, once they are committed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringstow._errors import BusyError
from ringstow._patience import patiently

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
_LOOK_S = 0.5
"""How often a thread looks within it whether the interpreter is exiting."""


class Copier:
    """Copies steps in a thread, one after the other.

    A step that a newer one overtakes before its copy has begun is passed over, unless it is to stay
    for good. A copy that has begun goes on, also if the step is removed meanwhile. One that failed
    is tried again, with longer and longer pauses, until a newer step overtakes it or `close` has
    tried it a last time.
    """

    _stays: Callable[[str], bool] | None = None
    """Which steps stay for good, by path."""

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
        self._failed: list[Added] = []
        """Steps whose copies failed, and that are tried again."""
        self._batch: list[Added] = []
        """The step that is being copied, and those that are copied after it."""
        self._left: list[Added] = []
        """Steps that were found, and that a save came before."""
        self._tries = 0
        """How often they were, since a step was added."""
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
            # First: a signal handler that saves may interrupt the start of the thread.
            self._is_running = True
            if threading.main_thread().is_alive():
                try:
                    # The interpreter's exit waits for it.
                    threading.Thread(
                        target=self._work, name="ringstow-copies", daemon=False
                    ).start()
                    return
                except RuntimeError as error:  # there can be no more threads
                    self._is_running = False
                    self._give_up(error)
                    return
        self._work()  # the interpreter is exiting, and waits for no new thread

    def add_found(self, path: str) -> None:
        """Copy a step that was not just saved."""
        self.add(path, is_new=False)

    def has(self, path: str) -> bool:
        """Return whether a step has yet to be copied, or is being copied."""
        return path in self.waiting()

    def waiting(self) -> list[str]:
        """Return the paths of the steps that have yet to be copied, or are being copied."""
        with self._changed:
            waiting = [*self._added[self._done :], *self._batch, *self._left, *self._failed]
        return [step.path for step in waiting]

    def rescue(self, path: str, ended: Future[bool] | None = None) -> None:
        """Copy a step that is committed, and may not survive a crash where it is."""
        if self._places:
            _log.warning("%s may not survive a crash: copying it to %s", path, self._places)
        self.add(path, is_new=False, ended=ended)

    def expected(self) -> Future[bool] | None:
        """Return what `add` is to be given; None if it copies nothing."""
        from concurrent.futures import Future  # takes a while, and only handles need it

        return Future() if self._places else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to copy; return whether that is so, and the last copy good.

        Does not wait for another try of a copy that failed.
        """
        if timeout is None:
            self._await(self._is_over)
        with self._changed:
            is_over = self._changed.wait_for(self._is_over, timeout)
            return is_over and self.error is None

    def _await(self, is_over: Callable[[], bool]) -> None:
        def wait(seconds: float | None) -> bool:
            with self._changed:
                return self._changed.wait_for(is_over, seconds)

        left = self._added[self._done :]
        patiently(wait, f"the program waits for the copy of {left[0].path if left else 'a step'}")

    def _is_over(self) -> bool:
        rests = self._is_resting and len(self._added) == self._done
        return rests or not self._is_running

    def close(self) -> None:
        """Wait until nothing is left to copy, and try a copy that failed a last time."""
        self.end_retries()
        self._await(lambda: not self._is_running)

    def end_retries(self) -> None:
        """Try a copy that failed a last time, now; waits for nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def pause_s(self) -> float | None:
        """Return after how many seconds the copy that just failed is tried again; None if never."""
        return self._next_pause_s() if self._may_repeat() and not self._was_last() else None

    def _may_repeat(self) -> bool:
        """Whether the copy that just ended is worth another try."""
        return passes(self.error)

    def _was_last(self) -> bool:
        """Whether the copies that just ended are not tried again."""
        return self._is_closing

    def _is_left(self, step: Added) -> bool:
        """Whether a step can still be copied."""
        return os.path.lexists(step.path)

    def _next_pause_s(self) -> float:
        first, longest = _PAUSES_S
        return min(first * 2.0 ** min(self._tries, 20), longest)

    def _rest(self) -> bool:
        """Wait before failed copies are tried again; return whether there is anything to do."""
        self._failed = [step for step in self._failed if self._is_left(step)]
        if not self._failed or self._was_last():
            self._failed, self._tries = [], 0
            return False
        self._is_resting = True
        self._changed.notify_all()
        until = time.monotonic() + self._next_pause_s()
        while time.monotonic() < until and not self._changed.wait_for(self._is_wanted, _LOOK_S):
            if not threading.main_thread().is_alive():  # the exit waits for this thread
                self._is_closing = True
        self._is_resting = False
        return True

    def _is_wanted(self) -> bool:
        return self._is_closing or len(self._added) > self._done

    def _work(self) -> None:
        try:
            self._copy_all()
        except BaseException as error:
            with self._changed:  # together: what is added after that starts another thread
                self._give_up(error)
                self._is_running = False
                self._changed.notify_all()

    def _copy_all(self) -> None:
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
            batch = self._added[self._done : newest]
            self._done = newest
            self._tries = 0 if batch else self._tries + 1
            left, self._left = self._left, []
            self._copy_batch([*self._taken_again(batch), *self._new_first([*batch, *left])])
            # Nothing is kept of those but their number.
            self._added[newest - len(batch) : newest] = [one._replace(ended=None) for one in batch]

    def _new_first(self, steps: list[Added]) -> list[Added]:
        """Return the steps in the order of their copies, without found ones that give way."""
        new = [step for step in steps if step.is_new]
        found = [step for step in steps if not step.is_new]
        late = [step for step in found if self._gives_way(step, new)]
        for step in late:
            self._pass_over(step)
            _set(step, is_there=False)
        return [*new, *(step for step in found if step not in late)]

    def _taken_again(self, batch: list[Added]) -> list[Added]:
        """Return the failed steps to try again: those that no later step overtakes."""
        failed, self._failed = self._failed, []
        return [
            step
            for number, step in enumerate(failed, 1)
            if not self._gives_way(step, [*failed[number:], *batch])
        ]

    def _copy_batch(self, batch: list[Added]) -> None:
        """Copy what is not passed over; ``error`` is that of the first copy that failed."""
        failure: BaseException | None = None
        for index, step in enumerate(batch):
            self._batch = batch[index:]
            if not step.is_new and self._was_step_saved():
                self._left = self._batch
                break
            if self._gives_way(step, batch[index + 1 :]):
                self._pass_over(step)
                _set(step, is_there=False)
                continue
            self.error = None
            is_there = self._copy(step)
            _set(step, is_there=is_there, error=self.error)
            if self._may_repeat():
                self._failed.append(step._replace(ended=None))
            failure = failure or self.error
        self._batch = []
        self.error = failure

    def _was_step_saved(self) -> bool:
        """Whether a step has been saved since the batch began: it goes before those found."""
        return any(step.is_new for step in self._added[self._done :])

    def _gives_way(self, step: Added, later: list[Added]) -> bool:
        """Whether a step is passed over, since those were added after it."""
        # What was saved never gives way to what was found: that is older, also if its number is
        # higher, since the run may have gone back.
        rivals = (other for other in later if other.is_new or not step.is_new)
        is_overtaken = any(self._overtakes(other, step) for other in rivals)
        return is_overtaken and not (self._stays and self._stays(step.path))

    def _overtakes(self, later: Added, step: Added) -> bool:
        """Whether a step need not be copied, since that one was added after it."""
        return True

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

    def _give_up(self, error: BaseException) -> None:
        """Copy none of the steps that were added."""
        with self._changed:
            given_up = self._added[self._done :] or self._added[-1:]
            self._done = len(self._added)
            self._batch, self._left = [], []
            self.error = error
        for step in self._added:
            _set(step, is_there=False, error=error)
        for step in given_up:
            _log.error("%s is saved, but not copied to %s: %s", step.path, self._places, error)


def passes(error: BaseException | None) -> bool:
    """Whether a copy that failed so may go well later."""
    return isinstance(error, (OSError, BusyError))


def _set(step: Added, *, is_there: bool, error: BaseException | None = None) -> None:
    if step.ended is None or step.ended.done():  # a copy that is tried again
        return
    if error is None:
        step.ended.set_result(is_there)
    else:
        step.ended.set_exception(error)
