"""Which steps of a run stay: the rules of a `CheckpointManager`, and the best step by a metric."""

from __future__ import annotations

import errno
import logging
import math
import operator
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ringstow import _catalog
from ringstow._arguments import names_of_parts
from ringstow._errors import InvalidStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ringstow._catalog_report import Retained, Step
    from ringstow._config import Config

Mode = Literal["min", "max"]

_log = logging.getLogger("ringstow")


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

    def stays(self, path: str) -> bool:
        """Return whether a step stays for good by its number, which its name ends in."""
        number = re.search(r"\d+$", path)
        if self.keep_every is None or number is None:
            return False
        return int(number[0]) % self.keep_every == 0

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


class Retention:
    """The removal of the steps that no rule keeps, and of parts of older ones, after each save."""

    def __init__(self, rules: Rules, root: str, config: Config | None) -> None:
        self._rules = rules
        self._root = root
        self._config = config
        self.report: Retained | None = None
        """What the last one did; None before the first, or if it failed."""
        self.error: Exception | None = None
        """Why the last removal or slimming failed."""
        self._settled: set[tuple[str, int | None]] = set()
        """Saves that this process need not slim: done, or their parts are not apart."""

    def run(self, is_awaited: Callable[[str], bool]) -> None:
        """Remove steps, slim others; log a failure, and never raise one: the save went well.

        Args:
            is_awaited: whether the step at a path is to be copied whole yet: it is slimmed later.
        """
        self.error = None
        if not self._rules.keeps_all:
            self._remove()
        if self._rules.slim_after is not None:
            self._slim(self._rules.slim_after, is_awaited)

    def _slim(self, after: int, is_awaited: Callable[[str], bool]) -> None:
        try:
            steps = _catalog.older_steps(self._root, after, self._config)
        except Exception as error:
            self.error = self.error or error
            _log.error("old steps in %s were not slimmed: %s", self._root, error)
            return
        for step in steps:
            # A later save to the path may have the parts apart.
            save = (step.path, step.created_unix_ms)
            if save in self._settled or is_awaited(step.path):
                continue
            if self._is_settled(step.path):
                self._settled.add(save)

    def _is_settled(self, path: str) -> bool:
        """Slim a step, or remove what a killed slimming left; return whether nothing is left."""
        try:
            report = _catalog.slim(path, self._rules.slim, config=self._config)
        except InvalidStateError as error:
            _log.warning("%s was not slimmed, and stays as it is: %s", path, error)
            return True
        except Exception as error:
            self.error = self.error or error
            _log.warning("%s was not slimmed: %s. The next save tries again", path, error)
            return False
        for left in report.left:
            _log.warning(
                "%s was not removed: %s. The next save tries again", left.path, left.reason
            )
        return not report.left

    def _remove(self) -> None:
        try:
            report = retain(self._root, self._rules, self._config)
        except Exception as error:
            self.report, self.error = None, error
            _log.error(
                "the step is saved, but the old steps in %s were not all removed: %s. The next "
                "save tries again; `ringstow retain %s` does it now",
                self._root,
                error,
                self._root,
            )
            return
        self.report = report
        for left in report.left:
            if left.failed:
                _log.warning(
                    "%s was not removed: %s. The next save tries again", left.path, left.reason
                )


def retain(root: str, rules: Rules, config: Config | None, pinned: Iterable[str] = ()) -> Retained:
    """Remove the steps of a directory, or of a URL, that no rule keeps and that are not pinned."""
    return _catalog.retained(
        root,
        rules.keep_last or 1,  # retain keeps the newest in any case
        rules.keep_every,
        rules.keep_best,
        pinned=pinned,
        config=config,
    )


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


def best_of(steps: Iterable[Step], metric: str, mode: Mode) -> Step | None:
    """Return the step with the best value of a metric, of several the newest.

    Steps without that metric, or whose value is not a number, do not count.
    """
    sign = -1.0 if mode == "min" else 1.0
    best: tuple[float, Step] | None = None
    for step in steps:  # oldest first
        value = step.metrics.get(metric)
        if value is None or math.isnan(value):
            continue
        if best is None or sign * value >= best[0]:
            best = sign * value, step
    return None if best is None else best[1]
