"""Plan which settings to measure, in which order and how often. Pure: no I/O.

The first phase varies every knob by itself. The second measures a grid of block size and queue
depth, which interact. The final compares the best few with the default again, in new rounds: the
best of forty settings owes part of its result to chance, which new rounds correct.
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
# The numbers worth trying. Knobs with named choices (engine, direct, fixed) or a bool (recycle)
# need no entry: the sweep tries every value that Config allows.
NUMBERS: dict[str, tuple[int, ...]] = {
    "block_bytes": tuple(n * MIB for n in (1, 2, 4, 8, 16)),
    "queue_depth": (2, 4, 8, 16, 32),
    "fillers": (1, 2, 4, 8),
    "files": (1, 2, 4),
}
# What a save leaves to others never makes it faster, nor does a bound for background saves.
FOR_OTHERS = (
    "nice",
    "io_priority",
    "pool_bytes",
    "write_rate",
    "tiers",
    "promotion_rate",
    "share_reads",
)
ACROSS, UPWARD = "queue_depth", "block_bytes"  # the grid's axes

OTHERS_IN_A_BLOCK = 5
LEAST_ROUNDS = {"one by one": 2, "grid": 2, "final": 5}
SHARES = {"one by one": 0.4, "grid": 0.35}  # of the time; the final gets the rest
FINALISTS = 3


class NoPlan(Exception):
    """The request does not fit; the message says what to change."""


@dataclass(frozen=True)
class Setting:
    """The changes from the default, sorted by name. `name` marks the special settings below."""

    changes: tuple[tuple[str, Value], ...] = ()
    name: str = ""

    @staticmethod
    def of(changes: Mapping[str, Value]) -> Setting:
        return Setting(tuple(sorted(changes.items())))

    def __str__(self) -> str:
        return self.name or ", ".join(told(*change) for change in self.changes) or "default"


DEFAULT = Setting()
AGAIN = Setting(name="default, again")  # shows how much equal settings differ by chance
FIO = Setting(name="fio")


def size(value: int) -> str:
    """Format bytes as in a configuration file."""
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
        """Return the knob with only the numbers next to the default."""
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
    wanted: Sequence[str] = (),
) -> list[Knob]:
    """Return the knobs of a Config with these fields.

    `does` holds the values that the default resolves to. They are not measured a second time:
    engine = "uring" is left out if "auto" chose it.
    """
    knobs = []
    for name, kind in types.items():
        if name in FOR_OTHERS or (wanted and name not in wanted):
            continue
        levels: Iterable[Value]
        if typing.get_origin(kind) is Literal:
            levels = [word for word in typing.get_args(kind) if word != "auto"]
        elif kind is bool:
            levels = [not defaults[name]]
        else:
            levels = NUMBERS.get(name, ())
        limit = 2 * cores if name == "fillers" else math.inf
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
        raise NoPlan(f"unknown knobs, or knobs without another value: {', '.join(sorted(unknown))}")
    return knobs


def one_by_one(knobs: Iterable[Knob]) -> list[Setting]:
    return [Setting.of({knob.name: level}) for knob in knobs for level in knob.levels]


def axis(knobs: Iterable[Knob], name: str) -> list[int]:
    """Return the values of a grid axis, including the default; empty if it is not swept."""
    for knob in knobs:
        if knob.name == name:
            return sorted(int(value) for value in (knob.default, *knob.levels))
    return []


def cell(knobs: Iterable[Knob], across: int, upward: int) -> Setting:
    """Return the setting at a cell of the grid."""
    defaults = {knob.name: knob.default for knob in knobs}
    place: dict[str, Value] = {ACROSS: across, UPWARD: upward}
    return Setting.of({name: value for name, value in place.items() if value != defaults[name]})


def grid(knobs: Sequence[Knob], pool_bytes: int) -> list[Setting]:
    """Return all combinations of block size and queue depth that fit in the pool.

    Beyond that, the pool limits the number of blocks in flight, not the queue depth.
    """
    return [
        setting
        for upward in axis(knobs, UPWARD)
        for across in axis(knobs, ACROSS)
        if upward * across <= pool_bytes and (setting := cell(knobs, across, upward)) != DEFAULT
    ]


def blocks(settings: Sequence[Setting], fio: bool, dice: random.Random) -> list[list[Setting]]:
    """Return one round: each setting once, in random order, in small blocks.

    Each block also measures the default, because a disk's speed drifts within a minute, but less
    within seconds.
    """
    others = [*settings, AGAIN, *([FIO] if fio else [])]
    dice.shuffle(others)
    count = math.ceil(len(others) / OTHERS_IN_A_BLOCK)
    parts = [[DEFAULT, *others[number::count]] for number in range(count)]
    for part in parts:
        dice.shuffle(part)
    return parts


def round_length(settings: int, fio: bool) -> int:
    """Return the number of measurements in a round."""
    others = settings + 1 + fio
    return others + math.ceil(others / OTHERS_IN_A_BLOCK)


@dataclass(frozen=True)
class Phase:
    name: str
    settings: tuple[Setting, ...]
    rounds: int
    each_s: float  # seconds per measurement
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
    """Return the phase with as many rounds as fit; None if not even the minimum fits."""
    rounds = int(seconds / each_s / round_length(len(settings), fio))
    if rounds < LEAST_ROUNDS[name]:
        return None
    return Phase(name, tuple(settings), rounds, each_s, fio)


@dataclass(frozen=True)
class Plan:
    """The phases that fit the time.

    `grid` is None if the time is too short or fewer than two of its knobs are swept; then there is
    no heat map. `final` holds placeholders, since its settings are not known yet.
    """

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
    """Plan as many rounds as fit into `seconds`, if a measurement takes `each_s`.

    If not even the minimum fits, try fewer levels of each knob.

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
