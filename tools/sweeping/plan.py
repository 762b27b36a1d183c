"""Which settings are measured, in which order and how often. Values in, values out: no I/O.

First every knob by itself, one step at a time away from the default; then a grid over the two that
work together, block size and queue depth; then the best few against the default again, in rounds
of their own. What looks best among forty is partly lucky, and luck does not last into new rounds.
"""

from __future__ import annotations

import math
import random
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Value = int | str

MIB = 1 << 20
# The numbers worth trying. Knobs that are a choice of words (engine, switches such as direct and
# fixed) or of yes and no (recycle) need no entry: all that Config allows is tried.
NUMBERS: dict[str, tuple[int, ...]] = {
    "block_bytes": tuple(n * MIB for n in (1, 2, 4, 8, 16)),
    "queue_depth": (2, 4, 8, 16, 32),
    "fillers": (1, 2, 4, 8),
    "files": (1, 2, 4),
    "pool_bytes": tuple(n * MIB for n in (64, 128, 256, 512, 1024)),
}
ACROSS, UPWARD = "queue_depth", "block_bytes"  # the grid's axes

OTHERS_IN_A_BLOCK = 5
LEAST_ROUNDS = {"one by one": 2, "grid": 2, "final": 5}
SHARES = {"one by one": 0.4, "grid": 0.35}  # of the time; the final has what is left
FINALISTS = 3


class NoPlan(Exception):
    """What is asked for does not fit; the message says what to change."""


@dataclass(frozen=True)
class Setting:
    """The changes from the default, sorted by name. With a `name` it is something else, below."""

    changes: tuple[tuple[str, Value], ...] = ()
    name: str = ""

    @staticmethod
    def of(changes: Mapping[str, Value]) -> Setting:
        return Setting(tuple(sorted(changes.items())))

    def __str__(self) -> str:
        return self.name or ", ".join(told(*change) for change in self.changes) or "default"


DEFAULT = Setting()
AGAIN = Setting(name="default, again")  # how far apart two equals come out here
FIO = Setting(name="fio")


def size(value: int) -> str:
    """Bytes as a configuration file takes them."""
    for unit, letter in [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")]:
        if value and value % unit == 0:
            return f"{value // unit}{letter}"
    return str(value)


def written(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return size(value) if isinstance(value, int) and name.endswith("_bytes") else str(value)


def told(name: str, value: Value) -> str:
    return f"{name} {written(name, value)}"


@dataclass(frozen=True)
class Knob:
    """A field of Config: its default, and the other values to try."""

    name: str
    default: Value
    levels: tuple[Value, ...]

    def near(self) -> Knob:
        """Numbers: the default's neighbours alone."""
        numbers = [n for n in self.levels if isinstance(n, int)]
        if len(numbers) < len(self.levels) or not isinstance(self.default, int):
            return self
        below = [n for n in numbers if n < self.default][-1:]
        return replace(self, levels=(*below, *[n for n in numbers if n > self.default][:1]))


def knobs_of(
    types: Mapping[str, Any],
    defaults: Mapping[str, Any],
    does: Mapping[str, Value],
    cores: int,
    pool_bytes_max: int,
    wanted: Sequence[str] = (),
) -> list[Knob]:
    """The knobs of a Config with these fields. `does`: what the default turned out to do, which is
    not measured under a second name (engine = "uring" where "auto" chose it)."""
    knobs = []
    for name, kind in types.items():
        if wanted and name not in wanted:
            continue
        levels: Iterable[Value]
        if typing.get_origin(kind) is Literal:
            levels = [word for word in typing.get_args(kind) if word != "auto"]
        elif kind is bool:
            levels = [not defaults[name]]
        else:
            levels = NUMBERS.get(name, ())
        limit = {"fillers": 2 * cores, "pool_bytes": pool_bytes_max}.get(name, math.inf)
        same = (defaults[name], does.get(name))
        levels = tuple(
            level
            for level in levels
            if level not in same and (isinstance(level, str) or level <= limit)
        )
        if levels:
            knobs.append(Knob(name, defaults[name], levels))
    unknown = set(wanted) - {knob.name for knob in knobs}
    if unknown:
        raise NoPlan(f"no knob to turn here: {', '.join(sorted(unknown))}")
    return knobs


def one_by_one(knobs: Iterable[Knob]) -> list[Setting]:
    return [Setting.of({knob.name: level}) for knob in knobs for level in knob.levels]


def axis(knobs: Iterable[Knob], name: str) -> list[int]:
    """The values of one of the grid's axes, the default's among them; none: it is not swept."""
    for knob in knobs:
        if knob.name == name:
            return sorted(int(value) for value in (knob.default, *knob.levels))
    return []


def cell(knobs: Iterable[Knob], across: int, upward: int) -> Setting:
    """The setting at a place of the grid."""
    defaults = {knob.name: knob.default for knob in knobs}
    place: dict[str, Value] = {ACROSS: across, UPWARD: upward}
    return Setting.of({name: value for name, value in place.items() if value != defaults[name]})


def grid(knobs: Sequence[Knob], pool_bytes: int) -> list[Setting]:
    """All block sizes with all queue depths, as far as the pool holds so many blocks: beyond, the
    pool and not the queue's depth says how much is in flight."""
    return [
        setting
        for upward in axis(knobs, UPWARD)
        for across in axis(knobs, ACROSS)
        if upward * across <= pool_bytes and (setting := cell(knobs, across, upward)) != DEFAULT
    ]


def blocks(settings: Sequence[Setting], fio: bool, dice: random.Random) -> list[list[Setting]]:
    """One round: each setting once, in random order, in small blocks that have the default among
    them, to be compared with: a disk's mood changes within a minute, less so within seconds."""
    others = [*settings, AGAIN, *([FIO] if fio else [])]
    dice.shuffle(others)
    count = math.ceil(len(others) / OTHERS_IN_A_BLOCK)
    parts = [[DEFAULT, *others[number::count]] for number in range(count)]
    for part in parts:
        dice.shuffle(part)
    return parts


def round_length(settings: int, fio: bool) -> int:
    """Measurements in a round."""
    others = settings + 1 + fio
    return others + math.ceil(others / OTHERS_IN_A_BLOCK)


@dataclass(frozen=True)
class Phase:
    name: str
    settings: tuple[Setting, ...]
    rounds: int
    each_s: float  # a measurement
    fio: bool

    @property
    def measurements(self) -> int:
        return self.rounds * round_length(len(self.settings), self.fio)

    @property
    def seconds(self) -> float:
        return self.measurements * self.each_s

    def __str__(self) -> str:
        return (
            f"{self.name:<11} {len(self.settings):>3} settings x {self.rounds} rounds, "
            f"{self.measurements} measurements, {duration(self.seconds)}"
        )


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def fitted(
    name: str, settings: Sequence[Setting], seconds: float, each_s: float, fio: bool
) -> Phase | None:
    """The phase with as many rounds as the time allows; None where it does not allow the least."""
    rounds = int(seconds / each_s / round_length(len(settings), fio))
    if rounds < LEAST_ROUNDS[name]:
        return None
    return Phase(name, tuple(settings), rounds, each_s, fio)


@dataclass(frozen=True)
class Plan:
    """What there is time for. `grid` is None where there is none for it, or no two knobs; then the
    heat map is left out. `final`'s settings are not known yet; it stands for as many."""

    knobs: tuple[Knob, ...]
    one_by_one: Phase
    grid: Phase | None
    final: Phase

    @property
    def phases(self) -> list[Phase]:
        return [phase for phase in (self.one_by_one, self.grid, self.final) if phase]


def make(
    knobs: Sequence[Knob],
    pool_bytes: int,
    seconds: float,
    each_s: float,
    fio: bool,
    refused: Iterable[Setting] = (),
) -> Plan:
    """As many rounds as fit into `seconds`, where a measurement takes `each_s`. Where not even the
    least fit, fewer levels of each knob.

    Raises:
        NoPlan: not even those fit.
    """
    final_least = LEAST_ROUNDS["final"] * round_length(FINALISTS, fio) * each_s
    for tried in (tuple(knobs), tuple(knob.near() for knob in knobs)):
        settings = [setting for setting in one_by_one(tried) if setting not in set(refused)]
        share = min(seconds * SHARES["one by one"], seconds - final_least)
        first = fitted("one by one", settings, share, each_s, fio)
        if first is None:
            continue
        left = seconds - first.seconds
        second = None
        for levels in (tried, tuple(knob.near() for knob in tried)):
            cells = grid(levels, pool_bytes)
            share = min(seconds * SHARES["grid"], left - final_least)
            if len(cells) > len(axis(levels, ACROSS)) + len(axis(levels, UPWARD)) - 2:
                second = second or fitted("grid", cells, share, each_s, fio)
        left -= second.seconds if second else 0
        final = fitted("final", [DEFAULT] * FINALISTS, left, each_s, fio)
        if final:
            return Plan(tried, first, second, final)
    least = [knob.near() for knob in knobs]
    first_least = LEAST_ROUNDS["one by one"] * each_s * round_length(len(one_by_one(least)), fio)
    need = max(final_least + first_least, first_least / SHARES["one by one"])
    raise NoPlan(
        f"a measurement takes {each_s:.1f} s here, so this needs --minutes "
        f"{math.ceil(need / 6) / 10:g} or more; or choose a smaller --gb, or fewer --knobs"
    )
