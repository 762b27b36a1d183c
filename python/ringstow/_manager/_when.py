"""When a `CheckpointManager` saves: asks its policies after each step, alike on all ranks.

What steps decide needs no communication. What one rank alone may know (a signal, a clock, whether a
save is durable) goes through beats: a small all-reduce every few steps, which overlaps with
training and counts from the next beat on. Decisions take only what all ranks have agreed on. This
module never saves, and never waits for a save.
"""

from __future__ import annotations

import collections
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._core import _when
from ringstow._core._arguments import numbered, span
from ringstow._core._errors import InvalidStateError
from ringstow._manager._signals import Notices

if TYPE_CHECKING:
    from ringstow._core._when import When
    from ringstow._manager._one_process import Side
    from ringstow._ranks._team import Team
    from ringstow._saving._save_future import SaveHandle

_log = logging.getLogger("ringstow")

# Beats are about this far apart, but never more steps, since steps may become much slower. One beat
# costs about half a millisecond, so this is 0.05 % of the training.
BEAT_US = 1_000_000
BEAT_STEPS_MAX = 32
# Ranks wait for the beat of such a step: to hear of a signal one step later would cost much grace.
LONG_STEP_US = 1_000_000

# A save may take longer than the longest of the last ones.
_USUAL = 1.25
_COUNTED_SAVES = 3
# How long a save may take before a deadline if nothing is known of one.
_UNKNOWN_SAVE_US = 60_000_000

# So long after a signal without a question, somebody reads `stopping` alone.
_UNHEARD_S = 5.0

_FOREVER_US = 1 << 60
_NEVER = -(1 << 61)


class Said(NamedTuple):
    """What a rank says in a beat; of each number the largest of all ranks is heard."""

    step: int = 0
    minus_step: int = 0
    step_us: int = 0
    """Mean time of a step since the last beat; 0 if unknown."""
    signal: int = 0
    """A signal that has come; 0 if none has."""
    minus_left_us: int = _NEVER
    """The time between now and the kill that follows a signal, negative."""
    minus_deadline_us: int = _NEVER
    """The time between now and the deadline of `Before`, negative."""
    save_us: int = 0
    """How long a save takes; 0 if unknown."""
    flight_us: int = 0
    """How long the save in progress still takes; 0 if there is none."""
    timed_at: int = 0
    """The question at which a clock asks for a save; 0 if none does. Only rank 0 says it."""


class Last(NamedTuple):
    """What to do about the last step of a training."""

    saves: bool
    why: str


def last_save(left_us: int, save_us: int, flight_us: int) -> Last:
    """Decide whether to save a last step.

    Args:
        left_us: the time that is left for it.
        save_us: how long a save takes; 0 or `_UNKNOWN_SAVE_US` if unknown.
        flight_us: how long the save in progress still takes; 0 if there is none.
    """
    if left_us >= _FOREVER_US // 2:
        return Last(True, "should_save asks for it")
    unknown = (0, _UNKNOWN_SAVE_US)
    left = _text(left_us)
    save, flight = (
        "an unknown time" if us in unknown else _text(us) for us in (save_us, flight_us)
    )
    takes = f"{left} are left, and a save takes {save}"
    after = f" after the one in progress, which takes {flight} more" if flight_us else ""
    # Only a try shows what is unknown. A save that does not make it leaves the earlier checkpoint.
    needed = sum(us for us in (save_us, flight_us) if us not in unknown)
    if 0 < left_us >= needed:
        return Last(True, f"should_save asks for it: {takes}{after}")
    if 0 < flight_us <= left_us:
        why = f"the save in progress is finished in its place: {takes}{after}"
        return Last(False, f"it is not saved, and {why}")
    also = ". The save in progress goes on, and may not be durable in time" if flight_us else ""
    return Last(False, f"it is not saved: {takes}{after}{also}. The earlier checkpoint stays")


class Schedule:
    """Answers after each step whether to save, and whether the training stops."""

    def __init__(
        self,
        when: When,
        side: Side[Any] | Team,
        root: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Handle the signals of a policy.

        Args:
            when: the policy, the same on all ranks.
            side: the ranks.
            root: the directory of the run, for messages.
            clock: returns seconds.

        Raises:
            InvalidStateError: a signal is to be handled, and this is not the main thread.
        """
        self._side, self._root, self._clock = side, root, clock
        self._of_steps = _when.of_steps(when)
        parts = _when.parts(when)
        intervals = [
            span(p.interval, "Every").total_seconds() for p in parts if isinstance(p, _when.Every)
        ]
        self._interval_s = min(intervals, default=math.inf)
        self._is_continuous = any(isinstance(part, _when.Continuous) for part in parts)
        to_go = [p.deadline_s - time.time() for p in parts if isinstance(p, _when.Before)]
        self._deadline = clock() + min(to_go, default=math.inf)
        graces = _when.graces(when)
        self._listens = bool(graces or intervals or to_go or self._is_continuous)
        self.stopping = False
        """Whether the training must end."""
        self.signal = 0
        """The signal that has ended it; 0 if none has."""
        self._step: int | None = None
        self._answer = False
        self._asked_at = clock()
        self._unsaved: int | None = None
        """A step that was to be saved, and no save of any step has begun since."""
        self._has_warned = False
        # A question is a call of `asks`: all ranks make the same.
        self._question = 0
        self._saved_at = 0
        """The last question that was answered by a save."""
        self._timed_at = 0
        """The question at which a clock asks for a save; 0 if none does."""
        self._due = clock() + self._interval_s
        # An interval below a second needs several beats: rank 0 announces each save in one.
        self._beat_us = int(min(BEAT_US, self._interval_s * 1e6 / 4))
        self._is_alone = side.size == 1
        self._lag = 0 if self._is_alone else 1
        """After how many questions a beat is heard; 0: at once."""
        self._next_beat = 1
        self._beaten_at = 1, clock()
        """The question and the time of the last beat; the first question before it."""
        self._unheard: Callable[[], list[int]] | None = None
        """Waits for the last beat."""
        self._reserve_s = 600.0
        """So long before a deadline every question looks at it, in a process alone."""
        self._flight: tuple[SaveHandle, float] | None = None
        self._took_s: collections.deque[float] = collections.deque(maxlen=_COUNTED_SAVES)
        self._notices = _handled(side, graces, clock)
        if graces or to_go:
            side.prepare_end()

    def restart(self) -> None:
        """Forget the step of the last question: the training goes on from another one."""
        self._step = None

    def asks(self, step: int) -> bool:
        """Return whether to save a step; see `CheckpointManager.should_save`."""
        step, before = numbered(step), self._step
        if before is not None and step <= before:
            if step == before:
                return self._answer
            raise InvalidStateError(
                f"should_save({step}) comes after should_save({before}): call it once after each "
                "step, with a number that grows"
            )
        self._tell_unsaved()
        self._step, self._asked_at = step, self._clock()
        self._question += 1
        answer = False
        for is_due in self._of_steps:
            if is_due(before, step):
                answer = True
        if self._listens and not self.stopping:
            if self._question >= self._next_beat:
                answer = self._listen(step, answer)
            if answer or 0 < self._timed_at <= self._question:
                answer = self.stopping or self._on_time(answer)
        if answer:
            self._saved_at, self._timed_at = self._question, 0
            self._unsaved = step
        self._answer = answer
        return answer

    def is_stopping(self) -> bool:
        """Return `stopping`; warn if a signal has come, and nobody asks any more."""
        if self._notices.noted and not self.stopping and not self._has_warned:
            came = min(self._notices.noted.values())
            if came > self._asked_at and self._clock() - came > _UNHEARD_S:
                self._tell_unheard()
        return self.stopping

    def note(self, number: signal.Signals) -> None:
        """Note a signal that another handler has got."""
        self._notices.noted.setdefault(number, self._clock())

    def heed(self) -> None:
        """Note that a save begins."""
        self._unsaved = None

    def _tell_unsaved(self) -> None:
        step, self._unsaved = self._unsaved, None
        if step is not None and not self._has_warned and self._side.is_first:
            self._has_warned = True
            _log.warning(
                "%s: should_save(%d) was true, and no save followed: call save or save_async then",
                self._root,
                step,
            )

    def _tell_unheard(self) -> None:
        self._has_warned = True
        _log.warning(
            "%s: %s came, and should_save was not called after it, so nothing was saved for it and "
            "stopping is false: call should_save(step) after each step",
            self._root,
            signal.Signals(max(self._notices.noted)).name,
        )

    # What the estimates need.

    def took(self, seconds: float) -> None:
        """Note how long a save took."""
        self._took_s.append(seconds)
        self._reserve_s = max(self._reserve_s, 10 * seconds)

    def follow(self, handle: SaveHandle) -> None:
        """Note a save that has begun in the background."""
        began = self._clock()
        self._flight = handle, began

        def ended(done: Any) -> None:  # does not refer to the handle, so that it can be freed
            flight = self._flight
            if flight is not None and flight[1] == began:  # no other save has begun since
                self._flight = None
            if done._is_committed():
                self.took(self._clock() - began)

        handle.add_done_callback(ended)

    def _flies(self) -> bool:
        # A save that is done may not have called `ended` yet.
        flight = self._flight
        return flight is not None and not flight[0].done()

    def _takes_us(self, now: float) -> tuple[int, int]:
        """Return how long a save takes, and the one in progress still takes; 0 if unknown, none."""
        usual = int(max(self._took_s, default=0.0) * _USUAL * 1e6)
        flight = self._flight
        if flight is None or flight[0].done():
            return usual, 0
        handle, began = flight
        elapsed = int((now - began) * 1e6)
        if usual:
            return usual, max(usual - elapsed, usual // 10)
        done = handle.progress()
        if not done.written:
            return _UNKNOWN_SAVE_US, _UNKNOWN_SAVE_US
        left = int(elapsed * max((done.total - done.written) / done.written, 0.1)) + 1
        return elapsed + left, left

    # Beats.

    def _listen(self, step: int, answer: bool) -> bool:
        """Hear the last beat and begin the next; return the answer."""
        now = self._clock()
        if self._question == 1:
            self._beaten_at = 1, now
        if self._is_alone and self._is_quiet(now):
            return answer
        if self._unheard is not None:
            answer = self._hear(step, answer)
            if self.stopping:
                return answer
        self._begin(step, now)
        if self._lag == 0:
            answer = self._hear(step, answer)
        self._next_beat = self._question + max(self._lag, 1)
        return answer

    def _is_quiet(self, now: float) -> bool:
        """Return whether this process, which is alone, has nothing to say to itself."""
        is_far = self._deadline == math.inf or self._deadline - now > self._reserve_s
        is_waiting = not self._is_continuous or self._flies()
        return not self._notices.noted and now < self._due and is_far and is_waiting

    def _begin(self, step: int, now: float) -> None:
        question, began = self._beaten_at
        self._beaten_at = self._question, now
        step_us = int((now - began) * 1e6) // max(self._question - question, 1)
        left_s = self._notices.left_s()
        said = Said(
            step,
            -step,
            step_us,
            max(self._notices.noted, default=0),
            _NEVER if left_s is None else -_us(left_s),
            _NEVER if self._deadline == math.inf else -_us(self._deadline - now),
            *self._takes_us(now),
            self._plan(now, step_us) if self._side.is_first else 0,
        )
        self._unheard = self._side.begin_max(list(said))

    def _plan(self, now: float, step_us: int) -> int:
        """Return the question at which a clock asks for a save; 0 if not before the beat after."""
        due = now if self._is_continuous and not self._flies() else self._due
        if due == math.inf:
            return 0
        ahead = max(due - now, 0) * 1e6
        steps = math.ceil(ahead / step_us) if step_us else (1 << 40 if ahead else 0)
        # What is said now is heard after the lag, and said again if there is time for that.
        if self._lag == 0:
            return self._question if ahead == 0 else 0
        return self._question + max(steps, self._lag) if steps < 2 * self._lag else 0

    def _hear(self, step: int, answer: bool) -> bool:
        """Take in what all ranks have said in the last beat."""
        assert self._unheard is not None
        wait, self._unheard = self._unheard, None
        self._side.doing = f"should_save({step}) of the manager of {self._root}"
        heard = Said(*wait())
        question = self._beaten_at[0]
        age_us = (self._question - question) * heard.step_us
        if heard.step != -heard.minus_step:
            raise InvalidStateError(
                f"the ranks ask should_save for different steps: {-heard.minus_step} and "
                f"{heard.step}. Call it on every rank, after the same steps"
            )
        if not self._is_alone:
            self._lag = lag_of(heard.step_us, self._beat_us)
        has_saved = self._saved_at >= question  # after they said it
        save_us, flight_us = heard.save_us, max(heard.flight_us - age_us, 0)
        if has_saved:
            save_us = flight_us = save_us or _UNKNOWN_SAVE_US
        if heard.minus_left_us > _NEVER:
            left_us = -heard.minus_left_us - age_us
            self.signal = heard.signal
            name = signal.Signals(self.signal).name
            return self._stop(step, name, left_us, last_save(left_us, save_us, flight_us))
        if heard.minus_deadline_us > _NEVER:
            left_us = -heard.minus_deadline_us - age_us
            later_us = left_us - (max(self._lag, 1) + 1) * heard.step_us
            if later_us < flight_us + (save_us or _UNKNOWN_SAVE_US):
                last = last_save(left_us, save_us, flight_us)
                return self._stop(step, "the deadline", left_us, last)
        if heard.timed_at and not has_saved:
            self._timed_at = heard.timed_at
        return answer

    def _on_time(self, answer: bool) -> bool:
        """Save because of a clock, or of steps; note when the next save is due."""
        now = self._clock()
        due = self._due + self._interval_s
        # After a save by a clock the next one is due by that clock, so that delays do not add up.
        self._due = now + self._interval_s if answer or due <= now else due
        return True

    def _stop(self, step: int, why: str, left_us: int, last: Last) -> bool:
        self.stopping, self._timed_at = True, 0
        # A save in progress goes on, also if it is not expected to be durable in time.
        is_limited = last.saves and left_us < _FOREVER_US // 2
        self._side.begin_end(left_us / 1e6 if is_limited else None)
        if self._side.is_first:
            _log.warning(
                "%s ends the training of %s after step %d; %s", why, self._root, step, last.why
            )
        return last.saves

    def settle(self) -> None:
        """Wait for the last beat: all ranks begin it before they close."""
        wait, self._unheard = self._unheard, None
        if wait is not None:
            wait()

    def close(self, *, settles: bool = False) -> None:
        """Restore the handlers of signals; warn of what was not heard, and not saved.

        Args:
            settles: before that, `settle`; the handlers are restored even if that fails.
        """
        try:
            if settles:
                self.settle()
        finally:
            self._tell_unsaved()
            if self._notices.noted and not self.stopping and not self._has_warned:
                self._tell_unheard()
            self._notices.close()
            self._side.finish_end()


def _handled(
    side: Side[Any] | Team,
    graces: Mapping[signal.Signals, float | None],
    clock: Callable[[], float],
) -> Notices:
    """Handle signals on all ranks, or on none if one cannot."""
    made: list[Notices] = []
    try:
        side.each(lambda: made.append(Notices(graces, clock)))
    except BaseException:
        for notices in made:
            notices.close()
        raise
    return made[0]


def lag_of(step_us: int, beat_us: int) -> int:
    """Return after how many steps of a length a beat is heard; 0: within the step."""
    if step_us >= LONG_STEP_US:
        return 0
    return min(max(beat_us // step_us, 1), BEAT_STEPS_MAX) if step_us else 1


def _us(seconds: float) -> int:
    return min(int(seconds * 1e6), _FOREVER_US) if seconds < math.inf else _FOREVER_US


def _text(us: int) -> str:
    return _native.duration(max(us, 0) / 1e6)
