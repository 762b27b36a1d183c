"""The caller's choices for a whole run: which steps stay, where copies go, what saves link.

These are plain values, checked when they are made; `_manager` applies them.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from ringstow import _native
from ringstow._core._arguments import StrPath, brief, integer, names_of_parts, span
from ringstow._core._config import in_bytes
from ringstow._core._errors import InvalidStateError

Mode = Literal["min", "max"]

Rules = tuple[
    int | None,
    int | None,
    datetime.timedelta | None,
    datetime.timedelta | None,
    tuple[str, str, int] | None,
]

_U64_MAX = 2**64 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps of a run stay. A step stays if one rule keeps it, and the newest always does.

    ``keep=3`` is short for ``keep=Retention(last=3)``. Without ``last``, ``every``, ``every_time``,
    ``within`` and ``best``, a manager removes no step.

    Raises:
        TypeError: a field has a value of the wrong type.
        InvalidStateError: a number is below 1, a time is none or not positive, ``best`` has no
            metric or mode, or ``drop`` is empty.
    """

    last: int | None = None
    """How many of the newest steps to keep."""
    every: int | None = None
    """Keep each step whose number is a multiple of this."""
    every_time: str | datetime.timedelta | None = None
    """Keep the first step of each interval of this length, such as ``"1h"``, by the time of its
    save. Intervals begin at 1970-01-01 UTC: those of an hour on the hour. A clock that was set back
    adds no step to an interval that has one."""
    within: str | datetime.timedelta | None = None
    """Keep the steps that were saved no longer before the last save than this, such as ``"2d"``."""
    best: tuple[str, Mode, int] | None = None
    """A metric's name, ``"min"`` or ``"max"``, and how many of the steps with the smallest or
    largest values to keep: ``("loss", "min", 2)``. NaN is never the best; of equal values the newer
    step is better. If no step has the metric, none is removed, and a warning says so."""
    slim_after: int | None = None
    """How many of the newest steps, and of the last saves, stay whole. Older steps that stay lose
    the parts that ``drop`` names, whichever rule keeps them. None means that all
    stay whole. Only for a `CheckpointManager`."""
    drop: tuple[str, ...] = ("optimizer",)
    """Names of the parts to drop, which each state must have; see `ringstow.slim`."""

    if TYPE_CHECKING:
        # The constructor accepts any iterable of names.
        def __init__(
            self,
            *,
            last: int | None = ...,
            every: int | None = ...,
            every_time: str | datetime.timedelta | None = ...,
            within: str | datetime.timedelta | None = ...,
            best: tuple[str, Mode, int] | None = ...,
            slim_after: int | None = ...,
            drop: Iterable[str] = ...,
        ) -> None: ...

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule: then no step is removed."""
        return all(rule is None for rule in self.rules)

    @property
    def rules(self) -> Rules:
        """The rules as the native side takes them."""
        every_time, within = self.every_time, self.within
        assert not isinstance(every_time, str)
        assert not isinstance(within, str)
        return self.last, self.every, every_time, within, self.best

    def __post_init__(self) -> None:
        """Check all fields."""
        for name in ("last", "every", "slim_after"):
            _check_number(self, name)
        for name in ("every_time", "within"):
            if (time := getattr(self, name)) is not None:
                object.__setattr__(self, name, span(time, f"Retention.{name}"))
        if self.best is not None:
            object.__setattr__(self, "best", _best(self.best))
        object.__setattr__(self, "drop", tuple(names_of_parts(self.drop, "Retention.drop")))
        if self.slim_after is not None and not self.drop:
            raise InvalidStateError(
                "Retention.slim_after drops nothing without a name in Retention.drop"
            )


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where a `CheckpointManager` copies each step, and how many stay in each place.

    ``tiers=[...]`` is short for ``tiers=Tiers([...])``. docs/tiers.md is the guide.

    Raises:
        TypeError: a field has a value of the wrong type.
        InvalidStateError: a number is below 1; or ``rate`` is not a size; or ``keep`` is less than
            ``keep_here``, so that steps would have no copy.
    """

    places: tuple[StrPath, ...] | None = None
    """Directories on other disks and object stores, nearest first, such as
    ``["/shared/run", "s3://bucket/run"]``. See `ringstow.promote`. All ranks must see these
    directories. None means ``Config.tiers``."""
    _: dataclasses.KW_ONLY
    keep: int | None = None
    """How many of the newest steps to keep in each place, besides steps kept by a rule of the
    manager's ``keep`` other than ``last``. None keeps all."""
    keep_here: int | None = None
    """How many of the newest steps stay in the manager's directory once all places have them: after
    each save, older steps with complete copies in every place are removed here, also steps that the
    manager's ``keep`` keeps. None leaves them to the manager's ``keep``."""
    rate: int | None = None
    """Maximum bytes a second of these copies, or a size such as ``"200M"``, which is kept as a
    number; 0 for no limit. None means ``Config.promotion_rate``."""

    if TYPE_CHECKING:
        # The constructor accepts more types than a field keeps.
        def __init__(
            self,
            places: Iterable[StrPath] | None = ...,
            *,
            keep: int | None = ...,
            keep_here: int | None = ...,
            rate: int | str | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check all fields, but not whether the places are usable."""
        if self.places is not None:
            object.__setattr__(self, "places", _places(self.places, "Tiers.places"))
        for name in ("keep", "keep_here"):
            _check_number(self, name)
        if self.keep is not None and self.keep_here is not None:
            here = ("Tiers.keep_here", self.keep_here)
            _native.check_covers(("Tiers.keep", self.keep), [here])
        if self.rate is not None:
            object.__setattr__(self, "rate", _rate(self.rate))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """Checkpoints on each node's own disk, which other nodes cannot read.

    Each node keeps the files of its own ranks, and a load fetches what a rank needs from other
    nodes. docs/distributed.md is the guide.

    Raises:
        TypeError: ``replicas`` is not an int.
        InvalidStateError: the number is below 1.
    """

    replicas: int = 1
    """How many nodes hold each node's files: 2 copies them to the next node in the background, so
    that a node can be lost with its disk. More than 1 needs a `CheckpointManager`, whose `restore`
    skips steps with lost files."""

    def __post_init__(self) -> None:
        """Check the number."""
        _check_number(self, "replicas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Previous:
    """Saves of a `CheckpointManager` that link the unchanged files of the previous step.

    ``base="previous"`` is short for ``base=Previous()``.

    Raises:
        TypeError: ``full_every`` is not an int.
        InvalidStateError: the number is below 1.
    """

    full_every: int | None = None
    """Write all files in every n-th save of the manager, so that it shares none with an earlier
    step: damage to a shared file damages all steps that share it. None means never."""

    def __post_init__(self) -> None:
        """Check the number."""
        _check_number(self, "full_every")


def retention(keep: int | Retention | None) -> Retention:
    """Return the `Retention` for an argument ``keep``.

    Raises:
        TypeError, InvalidStateError: the argument is neither a number of steps nor a `Retention`.
    """
    if keep is None:
        return Retention()
    if isinstance(keep, Retention):
        return keep
    return Retention(last=_number(keep, "keep", "a number of steps, or a ringstow.Retention"))


def tiers(given: Iterable[StrPath] | Tiers | None) -> Tiers:
    """Return the `Tiers` for an argument ``tiers``.

    Raises:
        TypeError: the argument is neither a list of places nor `Tiers`.
    """
    if given is None or isinstance(given, Tiers):
        return given or Tiers()
    return Tiers(_places(given, "tiers"))


def nodes(given: Nodes | None) -> Nodes | None:
    """Raise TypeError unless an argument ``nodes`` is None or `Nodes`; return it."""
    if given is not None and not isinstance(given, Nodes):
        raise TypeError(f"nodes must be ringstow.Nodes() or None, not {brief(given)}")
    return given


def previous(base: Literal["previous"] | Previous | None) -> Previous | None:
    """Return the `Previous` for a manager's argument ``base``, or None.

    Raises:
        TypeError, InvalidStateError: the argument is none of these.
    """
    if base is None or isinstance(base, Previous):
        return base
    expected = f'base must be "previous", ringstow.Previous(...) or None, not {brief(base)}'
    if not isinstance(base, str):
        raise TypeError(expected)
    if base != "previous":
        raise InvalidStateError(expected)
    return Previous()


def check_metric(metric: object, mode: object) -> None:
    """Refuse an invalid metric name or mode.

    Raises:
        TypeError: the metric is not text.
        InvalidStateError: the metric is empty, or the mode is unknown.
    """
    if not isinstance(metric, str):
        raise TypeError(f"a metric has a name, such as 'loss', not {brief(metric)}")
    if not metric:
        raise InvalidStateError("the metric's name is empty")
    if mode not in get_args(Mode):
        raise InvalidStateError(f'the mode is "min" or "max", not {mode!r}')


def _best(best: object) -> tuple[str, Mode, int]:
    if not isinstance(best, tuple | list) or len(best) != 3:
        raise TypeError(
            'Retention.best must be a metric, "min" or "max", and a number: ("loss", "min", 2), '
            f"not {brief(best)}"
        )
    metric, mode, count = best
    check_metric(metric, mode)
    return metric, mode, _number(count, "the number in Retention.best")


def _places(given: object, name: str) -> tuple[StrPath, ...]:
    if isinstance(given, str | os.PathLike):
        raise TypeError(f'{name} is a list of URLs and directories: {name}=["{os.fspath(given)}"]')
    listed = tuple(given) if isinstance(given, Iterable) else None
    if listed is None or not all(isinstance(place, str | os.PathLike) for place in listed):
        raise TypeError(f"{name} must be a list of URLs and directories, not {brief(given)}")
    return listed


def _rate(rate: object) -> int:
    if type(rate) is not int and not isinstance(rate, str):
        raise TypeError(f"Tiers.rate must be an int, or a size as text ('256M'), not {brief(rate)}")
    try:
        number = in_bytes(rate)
    except InvalidStateError as why:
        raise InvalidStateError(f"Tiers.rate = {why}") from None
    if not 0 <= number <= _U64_MAX:
        raise InvalidStateError(f"Tiers.rate = {number}: must be 0 or more bytes a second")
    return number


def _check_number(policy: object, name: str) -> None:
    value = getattr(policy, name)
    if value is not None or name == "replicas":
        full = f"{type(policy).__name__}.{name}"
        object.__setattr__(policy, name, _number(value, full))


def _number(value: object, name: str, what: str = "an int") -> int:
    number = integer(value, f"{name} must be {what}")
    if not 1 <= number <= _U64_MAX:
        raise InvalidStateError(f"{name} = {number}: must be 1 or more")
    return number
