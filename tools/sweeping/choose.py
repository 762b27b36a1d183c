"""Compute ratios and their spread, and decide whether a setting beats the default. Pure.

The rule: a setting's figure is the median ratio of its speed to the default's in the same block of
measurements. Only the final's own rounds decide. A finalist is better if the bootstrapped 95 %
interval of that median, widened for the number of finalists (Bonferroni), is above 1, in at least
five rounds. The better finalist with the highest median wins. If none is better, the default stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from sweeping.plan import (
    ACROSS,
    AGAIN,
    DEFAULT,
    FINALISTS,
    FIO,
    LEAST_ROUNDS,
    UPWARD,
    Knob,
    Setting,
    Value,
)

What = Literal["save", "load", "both"]

ERROR_RATE = 0.05
RESAMPLES = 4000
WORTH_COMBINING = 1.01  # a knob joins the combination only with at least this ratio


@dataclass(frozen=True)
class Measured:
    """One save and one load with one setting. `block` numbers the block over the whole sweep."""

    setting: Setting
    phase: str
    round: int
    block: int
    save: Mapping[str, float]  # bytes, seconds, cpu_seconds and, except for fio, staged_seconds
    load: Mapping[str, float]

    def speed(self, what: What) -> float:
        """Return GB (10^9 bytes) per second; for "both", the geometric mean."""
        if what == "both":
            return math.sqrt(self.speed("save") * self.speed("load"))
        result = self.save if what == "save" else self.load
        return result["bytes"] / max(result["seconds"], 1e-9) / 1e9


@dataclass(frozen=True)
class Spread:
    """A median, its bootstrapped interval, the range, and the number of values."""

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int

    def __str__(self) -> str:
        """Format the median and its interval."""
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float], error_rate: float = ERROR_RATE) -> Spread | None:
    """Return the spread, or None without values. The same values give the same interval."""
    if not values:
        return None
    array = numpy.asarray(values, dtype=float)
    dice = numpy.random.default_rng(0)
    medians = numpy.median(dice.choice(array, size=(RESAMPLES, len(array))), axis=1)
    low, high = numpy.quantile(medians, [error_rate / 2, 1 - error_rate / 2])
    return Spread(
        float(numpy.median(array)), float(low), float(high), min(values), max(values), len(values)
    )


def speeds(found: Iterable[Measured], setting: Setting, what: What) -> list[float]:
    return [m.speed(what) for m in found if m.setting == setting]


def ratios(
    found: Sequence[Measured], setting: Setting, what: What, phase: str | None = None
) -> list[float]:
    """Return the ratio of the setting's speed to the default's, for each block that has both."""
    base = {m.block: m.speed(what) for m in found if m.setting == DEFAULT}
    return [
        m.speed(what) / base[m.block]
        for m in found
        if m.setting == setting and m.block in base and phase in (None, m.phase)
    ]


def figure(found: Sequence[Measured], setting: Setting, what: What) -> Spread | None:
    return spread(ratios(found, setting, what))


def score(found: Sequence[Measured], setting: Setting, goal: What) -> float:
    got = ratios(found, setting, goal)
    return float(numpy.median(got)) if got else 0.0


def settings_of(found: Iterable[Measured]) -> list[Setting]:
    """Return all measured settings that can be chosen, without the default."""
    every = dict.fromkeys(m.setting for m in found)
    return [setting for setting in every if setting not in (DEFAULT, AGAIN, FIO)]


def combined(found: Sequence[Measured], knobs: Iterable[Knob], goal: What) -> Setting:
    """Combine the grid's best cell with the best level of every other knob that seems to help.

    Leave out levels that exclude each other.
    """
    changes: dict[str, Value] = {}
    on_grid = [s for s in settings_of(found) if {n for n, _ in s.changes} <= {ACROSS, UPWARD}]
    groups = [on_grid]
    for knob in knobs:
        if knob.name not in (ACROSS, UPWARD):
            groups.append([Setting.of({knob.name: level}) for level in knob.levels])
    for group in groups:
        best = max(group, key=lambda setting: score(found, setting, goal), default=DEFAULT)
        if score(found, best, goal) > WORTH_COMBINING:
            changes |= dict(best.changes)
    if changes.get("engine") == "portable":
        changes.pop("fixed", None)  # only io_uring has fixed buffers
    return Setting.of(changes)


def finalists(found: Sequence[Measured], knobs: Iterable[Knob], goal: What) -> list[Setting]:
    """Return the settings for the final: the combination, then the best of the others.

    Return an empty list if nothing was faster than the default.
    """
    ranked = sorted(
        settings_of(found), key=lambda setting: score(found, setting, goal), reverse=True
    )
    ahead = [setting for setting in ranked if score(found, setting, goal) > 1]
    chosen = dict.fromkeys([combined(found, knobs, goal), *ahead])
    chosen.pop(DEFAULT, None)
    return list(chosen)[:FINALISTS]


@dataclass(frozen=True)
class Verdict:
    """The setting to use, the reason, and the finalists' figures."""

    setting: Setting
    why: str
    figures: dict[Setting, Spread]


def verdict(found: Sequence[Measured], goal: What) -> Verdict:
    """Apply the rule at the top of this file."""
    final = [m for m in found if m.phase == "final"]
    if not final:
        return Verdict(DEFAULT, "the default: no setting reached a final", {})
    contenders = settings_of(final)
    figures = {}
    for setting in contenders:
        got = spread(ratios(final, setting, goal), ERROR_RATE / len(contenders))
        if got:
            figures[setting] = got
    least = LEAST_ROUNDS["final"]
    better = [s for s, f in figures.items() if f.count >= least and f.low > 1]
    if better:
        winner = max(better, key=lambda setting: figures[setting].median)
        got = figures[winner]
        return Verdict(
            winner, f"{winner}: {got} of the default's speed over {got.count} rounds", figures
        )
    if all(f.count < least for f in figures.values()):
        why = f"the default: fewer than {least} rounds of the final were measured"
    else:
        best = max(figures, key=lambda setting: figures[setting].median)
        why = (
            f"the default: nothing was certainly faster; the best, {best}, had {figures[best]} "
            f"of its speed over {figures[best].count} rounds"
        )
    return Verdict(DEFAULT, why, figures)
