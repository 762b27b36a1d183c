"""Which steps of a run stay: the rules of a `CheckpointManager`, and the best step by a metric."""

from __future__ import annotations

import errno
import operator
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ringstow import _native
from ringstow._arguments import names_of_parts
from ringstow._config import native_json
from ringstow._errors import InvalidStateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringstow._catalog_report import Step
    from ringstow._config import Config

Mode = Literal["min", "max"]


class Rules(NamedTuple):
    """What `retain` keeps. Without any rule nothing is removed."""

    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, Mode, int] | None
    slim_after: int | None = None
    """How many of the newest steps, and of the last saves, stay whole."""
    slim: tuple[str, ...] = ()
    """The parts that older steps lose."""

    @property
    def keeps_all(self) -> bool:
        """Whether no rule says which steps to keep."""
        return self[:3] == (None, None, None)

    @property
    def apart(self) -> tuple[str, ...]:
        """The parts that a save writes into files of their own."""
        return () if self.slim_after is None else self.slim

    def stays(self, step: int) -> bool:
        """Return whether a step stays for good by its number."""
        return self.keep_every is not None and step % self.keep_every == 0

    def room(self) -> str:
        """Say how many steps need room on the disk, and which rule to change."""
        if self.keeps_all:
            return (
                "The manager removes no step, since it has no rule: one with keep_last=n keeps n "
                "steps, and needs room for n + 1"
            )
        last = self.keep_last or 1  # the newest step stays in any case
        others = {"keep_every": self.keep_every, "keep_best": self.keep_best}
        given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
        besides = f", and for the steps that {' and '.join(given)} keeps" if given else ""
        return (
            "The manager removes old steps after the commit, so the disk needs room for keep + 1 "
            f"steps: with keep_last={last} for {last + 1}{besides}. Make the manager with rules "
            "that keep fewer"
        )

    def explain(self, error: BaseException) -> None:
        """Add to the error of a save that met a full disk how much room the rules need."""
        met = error if isinstance(error, OSError) else error.__cause__  # another rank's
        if not isinstance(met, OSError) or met.errno not in (errno.ENOSPC, errno.EDQUOT):
            return
        room = self.room()
        if room in str(error):
            return
        if isinstance(error, OSError):
            error.strerror = f"{error.strerror}. {room}"
        else:
            error.args = (f"{error}. {room}", *error.args[1:])

    def best(self, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
        """Return by which metric a step is the best: the given one, or that of ``keep_best``.

        Raises:
            InvalidStateError: neither names one.
            TypeError, ValueError: the metric has no name, or the mode is unknown.
        """
        if metric is None and mode is None and self.keep_best is not None:
            return self.keep_best[:2]
        if metric is None or mode is None:
            raise InvalidStateError(
                'which step is the best? Make the manager with keep_best=("loss", "min", 2), or '
                'call best("loss", "min")'
            )
        check_metric(metric, mode)
        return metric, mode


def checked(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, Mode, int] | None,
    slim_after: int | None,
    slim: Iterable[str],
) -> Rules:
    """Check the rules.

    Raises:
        TypeError: a number is no integer, or ``keep_best`` is no tuple of three.
        ValueError: a number is below 1, or ``keep_best`` names no metric or no mode; or ``slim``
            names nothing.
        InvalidStateError: a name in ``slim`` is none.
    """
    parts = tuple(names_of_parts(slim, "slim"))
    if slim_after is not None and not parts:
        raise ValueError("slim_after drops nothing without a name in slim")
    if keep_best is not None:
        if isinstance(keep_best, str) or len(keep_best) != 3:
            raise TypeError(
                f'keep_best is a metric, "min" or "max", and a number: ("loss", "min", 2), not '
                f"{keep_best!r}"
            )
        metric, mode, number = keep_best
        check_metric(metric, mode)
        keep_best = (metric, mode, positive(number, "the number in keep_best"))
    return Rules(
        None if keep_last is None else positive(keep_last, "keep_last"),
        None if keep_every is None else positive(keep_every, "keep_every"),
        keep_best,
        None if slim_after is None else positive(slim_after, "slim_after"),
        parts,
    )


def clearing(
    root: str, rules: Rules, tiers: tuple[str, ...], keep_here: int | None, config: Config | None
) -> _native.Clearing:
    """Return what removes and slims the steps of a run."""
    slim = None if rules.slim_after is None else (rules.slim_after, list(rules.slim))
    eviction = None if keep_here is None else (tiers, keep_here)
    return _native.Clearing(root, rules[:3], slim, eviction, native_json(config))


def check_keep_here(keep: int | None, here: Rules, there: Rules) -> None:
    """Check how many steps stay in the run's directory once all tiers have them.

    Raises:
        TypeError, ValueError: it is no number of steps.
        InvalidStateError: ``keep_promoted`` removes from the tiers what is to be kept.
    """
    if keep is None:
        return
    positive(keep, "keep_here")
    if there.keep_last is not None:
        others = {"keep_here": keep, "keep_last": here.keep_last}
        given = [(name, count) for name, count in others.items() if count is not None]
        _native.check_covers(("keep_promoted", there.keep_last), given)


def on_tiers(rules: Rules, keep: int | None) -> Rules:
    """Return the rules for further tiers: the same, but for the number of the newest steps.

    Raises:
        TypeError, ValueError: the number is none, or below 1.
    """
    if keep is None:
        return Rules(None, None, None)
    return Rules(positive(keep, "keep_promoted"), rules.keep_every, rules.keep_best)


def check_metric(metric: object, mode: object) -> None:
    """Refuse what names no metric, or neither the smallest nor the largest value.

    Raises:
        TypeError: the metric is no text.
        ValueError: it is empty, or the mode is unknown.
    """
    if not isinstance(metric, str):
        raise TypeError(f"a metric has a name, such as 'loss', not {metric!r}")
    if not metric:
        raise ValueError("the metric's name is empty")
    if mode not in get_args(Mode):
        raise ValueError(f'the mode is "min" or "max", not {mode!r}')


def positive(number: object, name: str) -> int:
    if isinstance(number, bool):
        raise TypeError(f"{name} is a number, not {number!r}")
    try:
        value = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is an integer, not {number!r}") from None
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
    return value


def best_of(steps: list[Step], metric: str, mode: Mode) -> Step | None:
    """Return the step with the best value of a metric, of several the newest.

    Steps without that metric, or whose value is not a number, do not count.

    Args:
        steps: the steps, newest first.
        metric: the metric's name.
        mode: ``"min"`` or ``"max"``.
    """
    at = _native.best_of([step.metrics.get(metric) for step in steps], mode)
    return None if at is None else steps[at]
