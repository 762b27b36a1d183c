"""What a caller chooses for a whole run: which steps stay, where copies go, what saves link.

Values alone, checked when they are made. `_manager` carries them out.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from ringstow import _native
from ringstow._core._arguments import StrPath, names_of_parts
from ringstow._core._config import in_bytes
from ringstow._core._errors import InvalidStateError

Mode = Literal["min", "max"]

_U64_MAX = 2**64 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps of a run stay: those that one of ``last``, ``every`` and ``best`` keeps.

    ``keep=3`` is short for ``keep=Retention(last=3)``. The newest step stays in any case. Without
    any of the three, a manager removes no step.

    Raises:
        TypeError: a field has a value of the wrong type.
        InvalidStateError: a number is below 1, ``best`` names no metric or no mode, or ``drop``
            names nothing.
    """

    last: int | None = None
    """How many of the newest steps to keep."""
    every: int | None = None
    """Keep each step whose number is a multiple of this."""
    best: tuple[str, Mode, int] | None = None
    """A metric's name, ``"min"`` or ``"max"``, and how many of the steps with the smallest or
    largest values to keep: ``("loss", "min", 2)``. NaN is never the best; of equal ones the newer
    step is. If no step has the metric, none is removed, and a warning says so."""
    slim_after: int | None = None
    """How many of the newest steps, and of the last saves, stay whole. Older ones that stay lose
    the parts that ``drop`` names, also those that ``every`` and ``best`` keep. None means that all
    stay whole. For a `CheckpointManager` only."""
    drop: tuple[str, ...] = ("optimizer",)
    """Names of these parts, which each state must have; see `ringstow.slim`."""

    if TYPE_CHECKING:
        # The constructor accepts any iterable of names.
        def __init__(
            self,
            *,
            last: int | None = ...,
            every: int | None = ...,
            best: tuple[str, Mode, int] | None = ...,
            slim_after: int | None = ...,
            drop: Iterable[str] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check all fields."""
        for name in ("last", "every", "slim_after"):
            _check_number(self, name)
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
        InvalidStateError: a number is below 1; or ``rate`` is no size; or ``keep`` is less than
            ``keep_here``, so that steps would be nowhere.
    """

    places: tuple[StrPath, ...] | None = None
    """Directories on other disks and object stores, nearest first, such as
    ``["/shared/run", "s3://bucket/run"]``. See `ringstow.promote`. All ranks must see these
    directories. None means those of ``Config.tiers``."""
    _: dataclasses.KW_ONLY
    keep: int | None = None
    """How many of the newest steps to keep in each place, and those that ``every`` and ``best`` of
    the manager's ``keep`` keep. None keeps all."""
    keep_here: int | None = None
    """How many of the newest steps stay in the manager's directory once all places have them: after
    each save, older ones that every place has whole are removed here, also those that ``every`` and
    ``best`` keep there. None leaves them to the manager's ``keep``."""
    rate: int | None = None
    """Bytes a second of these copies at most, or a size such as ``"200M"``, which is kept as a
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
        """Check all fields, but not whether the places can be used."""
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
    """Ranks whose checkpoints are on their nodes' own disks, which ranks on other nodes do not see.

    Each node keeps the files of its own ranks, and a load brings what a rank needs from the others.
    docs/nodes.md is the guide.

    Raises:
        TypeError: ``replicas`` is no int.
        InvalidStateError: it is below 1.
    """

    replicas: int = 1
    """On how many nodes the files of each node are: 2 copies them to the next node in the
    background, so that a node can be lost with its disk. More than 1 is for a `CheckpointManager`,
    whose `restore` passes over steps of which files are lost."""

    def __post_init__(self) -> None:
        """Check the number."""
        _check_number(self, "replicas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Previous:
    """Saves of a `CheckpointManager` that link the unchanged files of the step before.

    ``base="previous"`` is short for ``base=Previous()``.

    Raises:
        TypeError: ``full_every`` is no int.
        InvalidStateError: it is below 1.
    """

    full_every: int | None = None
    """Every which save of the manager writes all files, so that it shares none with an earlier
    step: damage to a shared file is damage to all steps that share it. None means none."""

    def __post_init__(self) -> None:
        """Check the number."""
        _check_number(self, "full_every")


def retention(keep: int | Retention | None) -> Retention:
    """Return what an argument ``keep`` means.

    Raises:
        TypeError, InvalidStateError: it is neither a number of steps nor a `Retention`.
    """
    if keep is None:
        return Retention()
    if isinstance(keep, Retention):
        return keep
    return Retention(last=_number(keep, "keep", "a number of steps, or a ringstow.Retention"))


def tiers(given: Iterable[StrPath] | Tiers | None) -> Tiers:
    """Return what an argument ``tiers`` means.

    Raises:
        TypeError: it is neither a list of places nor `Tiers`.
    """
    if given is None or isinstance(given, Tiers):
        return given or Tiers()
    return Tiers(_places(given, "tiers"))


def nodes(given: Nodes | None) -> Nodes | None:
    """Raise TypeError unless an argument ``nodes`` is None or `Nodes`; return it."""
    if given is not None and not isinstance(given, Nodes):
        raise TypeError(f"nodes must be ringstow.Nodes() or None, not {given!r}")
    return given


def previous(base: Literal["previous"] | Previous | None) -> Previous | None:
    """Return what a manager's argument ``base`` means.

    Raises:
        TypeError, InvalidStateError: it is nothing of the kind.
    """
    if base is None or isinstance(base, Previous):
        return base
    expected = f'base must be "previous", ringstow.Previous(...) or None, not {base!r}'
    if not isinstance(base, str):
        raise TypeError(expected)
    if base != "previous":
        raise InvalidStateError(expected)
    return Previous()


def check_metric(metric: object, mode: object) -> None:
    """Refuse what names no metric, or neither the smallest nor the largest value.

    Raises:
        TypeError: the metric is no text.
        InvalidStateError: it is empty, or the mode is unknown.
    """
    if not isinstance(metric, str):
        raise TypeError(f"a metric has a name, such as 'loss', not {metric!r}")
    if not metric:
        raise InvalidStateError("the metric's name is empty")
    if mode not in get_args(Mode):
        raise InvalidStateError(f'the mode is "min" or "max", not {mode!r}')


def _best(best: object) -> tuple[str, Mode, int]:
    if not isinstance(best, tuple | list) or len(best) != 3:
        raise TypeError(
            'Retention.best must be a metric, "min" or "max", and a number: ("loss", "min", 2), '
            f"not {best!r}"
        )
    metric, mode, count = best
    check_metric(metric, mode)
    return metric, mode, _number(count, "the number in Retention.best")


def _places(given: object, name: str) -> tuple[StrPath, ...]:
    if isinstance(given, str | os.PathLike):
        raise TypeError(f'{name} is a list of URLs and directories: {name}=["{os.fspath(given)}"]')
    listed = tuple(given) if isinstance(given, Iterable) else None
    if listed is None or not all(isinstance(place, str | os.PathLike) for place in listed):
        raise TypeError(f"{name} must be a list of URLs and directories, not {given!r}")
    return listed


def _rate(rate: object) -> int:
    if type(rate) is not int and not isinstance(rate, str):
        raise TypeError(f"Tiers.rate must be an int, or a size as text ('256M'), not {rate!r}")
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
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {what}, not {value!r}")
    number = operator.index(value)
    if not 1 <= number <= _U64_MAX:
        raise InvalidStateError(f"{name} = {number}: must be 1 or more")
    return number
