"""When a training saves: policies, as plain values that are checked when they are made.

`_manager/_when.py` asks them after each step, and makes all ranks answer alike.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import signal
from collections.abc import Callable, Iterable, Mapping

from ringstow._core._arguments import brief, integer, span
from ringstow._core._errors import InvalidStateError

# Times before this one are mistaken for spans.
_LONG_AGO_S = 1e9


class When:
    """When to save: one policy, or several joined by ``|``, of which any can ask for a save.

    `CheckpointManager` takes it as ``when``: ``EverySteps(500) | OnSignal(grace="30s")``.
    """

    def __or__(self, other: When) -> When:
        """Return a policy that saves whenever one of the two does."""
        if not isinstance(other, When):
            return NotImplemented
        return AnyOf((*parts(self), *parts(other)))

    def _is_due(self, before: int | None, step: int) -> bool:
        """Return whether steps alone ask for a save.

        Args:
            before: the step of the previous question; None if this is the first.
            step: the step of this question.
        """
        return False


@dataclasses.dataclass(frozen=True, repr=False)
class AnyOf(When):
    """Several policies; `When.__or__` makes it."""

    parts: tuple[When, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclasses.dataclass(frozen=True)
class EverySteps(When):
    """Save at each multiple of a number of steps, from that number on.

    If the training counts in larger strides, save at the first step at or after each multiple.
    Add `First` to save step 0, too.

    Raises:
        TypeError: the number is not an int.
        InvalidStateError: the number is below 1.
    """

    steps: int
    """The number of steps from one save to the next."""

    def __post_init__(self) -> None:
        """Check the number."""
        object.__setattr__(self, "steps", _integer(self.steps, "EverySteps", 1))

    def _is_due(self, before: int | None, step: int) -> bool:
        last = step - 1 if before is None else before
        return step > 0 and step // self.steps > max(last, 0) // self.steps


@dataclasses.dataclass(frozen=True)
class AtSteps(When):
    """Save at certain steps.

    If the training counts in larger strides, save at the first step at or after each of them.

    Raises:
        TypeError: the argument is not a list of ints.
        InvalidStateError: the list is empty, or a step is negative.
    """

    steps: Iterable[int]
    """The steps, in any order."""

    def __post_init__(self) -> None:
        """Check the steps, and sort them."""
        given = self.steps
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(
                f"AtSteps takes a list of steps, such as AtSteps([100, 1000]), not {brief(given)}"
            )
        steps = tuple(sorted({_integer(step, "AtSteps", 0) for step in given}))
        if not steps:
            raise InvalidStateError("AtSteps without a step never saves: name one, or leave it out")
        object.__setattr__(self, "steps", steps)

    def _is_due(self, before: int | None, step: int) -> bool:
        last = step - 1 if before is None else before
        steps: tuple[int, ...] = tuple(self.steps)  # a tuple already
        return bisect.bisect_right(steps, step) > bisect.bisect_right(steps, last)


@dataclasses.dataclass(frozen=True)
class First(When):
    """Save at the first step after each start: a setup that cannot save fails at once."""

    def _is_due(self, before: int | None, step: int) -> bool:
        return before is None


@dataclasses.dataclass(frozen=True)
class Every(When):
    """Save each time that an interval has passed since the last save that ``when`` asked for.

    ``Every("10min")``: units are ms, s, min, h, d and w. On several ranks rank 0's clock
    decides for all.

    Raises:
        TypeError: the interval is neither text nor a `datetime.timedelta`.
        InvalidStateError: the text is no time, or not positive.
    """

    interval: str | datetime.timedelta
    """The time from one save to the next."""

    def __post_init__(self) -> None:
        """Check the interval."""
        span(self.interval, "Every")


@dataclasses.dataclass(frozen=True)
class Continuous(When):
    """Save as soon as the save before is durable: as often as the disk allows.

    On several ranks rank 0 decides for all.
    """


@dataclasses.dataclass(frozen=True, init=False)
class OnSignal(When):
    """Save once when a signal arrives, such as SIGTERM before a job is ended, and stop.

    Soon after, all ranks agree at the end of a step, also if only one of them got the signal:
    `CheckpointManager.should_save` returns True, the save returns once it is durable, and
    `CheckpointManager.stopping` is true. The same signal a second time, more than a second later,
    ends the process as if there were no handler; the earlier checkpoint stays whole.

    The handler only notes the signal, and calls the handler that the program had set before.
    `CheckpointManager.close` restores that one. Make the manager in the main thread: Python sets
    handlers only there.

    Args:
        signals: the signals; SIGTERM if none is named.
        grace: the time from the signal until the process is killed, such as ``"30s"``. The manager
            then saves the last step only if that will be durable in time, and otherwise lets a save
            in progress finish; it logs which, and why. None: it saves whatever time that takes.

    Raises:
        TypeError: not a signal; or ``grace`` is neither text nor a `datetime.timedelta`.
        InvalidStateError: the signal cannot be handled (SIGKILL, SIGSTOP), or ``grace`` is no time.
    """

    signals: tuple[signal.Signals, ...]
    """The signals to handle."""
    grace: str | datetime.timedelta | None
    """The time from a signal until the process is killed; None if nothing kills it."""

    def __init__(
        self, *signals: signal.Signals, grace: str | datetime.timedelta | None = None
    ) -> None:
        """Store the signals and the time that is left after one."""
        known = tuple(_signal(one) for one in signals) or (signal.SIGTERM,)
        object.__setattr__(self, "signals", known)
        if grace is not None:
            span(grace, "OnSignal.grace")
        object.__setattr__(self, "grace", grace)


@dataclasses.dataclass(frozen=True)
class Before(When):
    """Save once, so late that the save is still durable before a deadline, and stop.

    The manager knows how long its saves take. Slurm's time limit is
    ``Before(int(os.environ["SLURM_JOB_END_TIME"]))``. On several ranks the earliest deadline by
    their own clocks counts.

    Raises:
        TypeError: the deadline is neither a `datetime.datetime` nor a number.
        InvalidStateError: it is before 2001, as a number of seconds from now would be.
    """

    deadline: datetime.datetime | float
    """A datetime (local time if it has no zone), or seconds since 1970."""

    def __post_init__(self) -> None:
        """Check the deadline."""
        given = self.deadline
        if isinstance(given, bool) or not isinstance(given, datetime.datetime | int | float):
            raise TypeError(
                "Before takes a datetime.datetime, or seconds since 1970 as time.time() counts "
                f"them, not {brief(given)}"
            )
        if self.deadline_s < _LONG_AGO_S:
            raise InvalidStateError(
                f"Before({brief(given)}) is a time before 2001: give a datetime.datetime, or "
                "seconds since 1970, such as time.time() + 3600"
            )

    @property
    def deadline_s(self) -> float:
        """The deadline in seconds since 1970."""
        given = self.deadline
        return given.timestamp() if isinstance(given, datetime.datetime) else float(given)


def parts(when: When) -> tuple[When, ...]:
    """Return the single policies of one that may have been joined by ``|``."""
    return when.parts if isinstance(when, AnyOf) else (when,)


def of_steps(when: When) -> list[Callable[[int | None, int], bool]]:
    """Return the questions of the policies to which steps matter."""
    return [part._is_due for part in parts(when) if type(part)._is_due is not When._is_due]


def checked(when: object) -> When | None:
    """Return a manager's argument ``when``.

    Raises:
        TypeError: it is neither a policy nor None; says what to write.
    """
    if when is None or isinstance(when, When):
        return when
    hint = "such as ringstow.EverySteps(500) | ringstow.OnSignal()"
    if isinstance(when, type) and issubclass(when, When):
        hint = f"and {when.__name__} is a class: write {when.__name__}(...)"
    elif isinstance(when, int) and not isinstance(when, bool):
        hint = f"such as ringstow.EverySteps({when})"
    raise TypeError(f"when must be a policy, {hint}; not {brief(when)}")


def compared(when: When | None) -> list[str]:
    """Return what must be equal on all ranks: everything but deadlines, which are by a clock."""
    each = () if when is None else parts(when)
    return ["Before" if isinstance(part, Before) else repr(part) for part in each]


def graces(when: When) -> Mapping[signal.Signals, float | None]:
    """Return the signals to handle, each with its seconds of grace; None means unlimited.

    A signal that is named twice has the shorter grace.
    """
    found: dict[signal.Signals, float | None] = {}
    for part in parts(when):
        if isinstance(part, OnSignal):
            own = None if part.grace is None else span(part.grace, "OnSignal.grace").total_seconds()
            for one in part.signals:
                given = [found.get(one), own]
                found[one] = min((s for s in given if s is not None), default=None)
    return found


def _integer(given: object, name: str, least: int) -> int:
    number = integer(given, f"{name} takes whole numbers of steps")
    if number < least:
        raise InvalidStateError(f"{name}({number}): must be {least} or more")
    return number


def _signal(given: object) -> signal.Signals:
    try:
        if isinstance(given, bool) or not isinstance(given, int):
            raise ValueError
        one = signal.Signals(given)
    except ValueError:
        raise TypeError(
            f"OnSignal takes signals, such as OnSignal(signal.SIGTERM), not {brief(given)}"
        ) from None
    if one in (signal.SIGKILL, signal.SIGSTOP):
        raise InvalidStateError(f"no program can handle {one.name}: name SIGTERM or another one")
    return one
