"""The table and the JSON of step_time.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from comparing.table import spread

from stepping.contenders import Row
from stepping.training import Turn

NAME = 24
WIDTHS = (19, 19, 17, 17, 19)
HEAD = ("lost, s", "blocked, s", "step, times", "save, s", "of {base}'s")


@dataclass
class Found:
    """The turns of each contender by round, and why others have none."""

    rows: Mapping[str, Row]
    base: str  # whose lost time is 1
    turns: list[dict[str, Turn]] = field(default_factory=list)
    gil: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[Turn]:
        return [round_[name] for round_ in self.turns if name in round_]

    def ratios(self, name: str) -> list[float]:
        """Return, per round, the lost time as a multiple of the base's."""
        return [
            round_[name].lost / round_[self.base].lost
            for round_ in self.turns
            if name in round_ and self.base in round_ and round_[self.base].lost > 0
        ]

    def told(self) -> dict[str, Any]:
        """Return all that was measured, for other programs."""
        return {
            "base": self.base,
            "rounds": [{name: t.told() for name, t in round_.items()} for round_ in self.turns],
            "summary": {name: self.summary(name) for name in self.rows if self.of(name)},
            "gil": self.gil,
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def summary(self, name: str) -> dict[str, Any]:
        figures = {
            "lost": [turn.lost for turn in self.of(name)],
            "blocked": [turn.blocked for turn in self.of(name)],
            "slowdown": [turn.slowdown for turn in self.of(name) if turn.slowdown is not None],
            "save": [turn.save for turn in self.of(name)],
            "of_base": self.ratios(name),
        }
        return {"fsync": self.rows[name].fsync} | {
            what: [statistics.median(values), min(values), max(values)]
            for what, values in figures.items()
            if values
        }


def line(name: str, cells: tuple[str, ...], last: str) -> str:
    told = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f"{name:<{NAME}} {told}  {last}".rstrip()


def table(found: Found) -> Iterator[str]:
    yield line("", tuple(cell.format(base=found.base) for cell in HEAD), "fsync")
    for name, row in found.rows.items():
        if turns := found.of(name):
            cells = (
                spread([turn.lost for turn in turns]),
                spread([turn.blocked for turn in turns]),
                spread([turn.slowdown for turn in turns if turn.slowdown is not None]),
                spread([turn.save for turn in turns]),
                spread(found.ratios(name)),
            )
            yield line(name, cells, row.fsync)
        for word, reasons in (("skipped", found.skipped), ("FAILED", found.failed)):
            if name in reasons:
                yield f"{name:<{NAME}} {word}: {reasons[name]}"
    yield from notes(found)


def notes(found: Found) -> Iterator[str]:
    yield ""
    yield "Median (lowest-highest) over the rounds. Lost: blocked, plus what each step until the"
    yield "  save was durable took beyond the median step before that save. Step: the mean of these"
    yield f"  steps, in median steps. Last: lost time, in {found.base}'s of the same round."
    yield "fsync: own: the library syncs; own files: the library syncs files, this tool"
    yield "  directories; added: this tool syncs all. The syncs are part of the save."


def gil_table(found: Found) -> Iterator[str]:
    if not found.gil:
        return
    yield ""
    yield f"{'':<{NAME}} {'counts, of idle':>16} {'without the GIL':>16} {'without a core':>16}"
    for name, told in found.gil.items():
        if "failed" in told:
            yield f"{name:<{NAME}} FAILED: {told['failed']}"
            continue
        saving = told["saving"]
        shares = (told["rate_of_idle"], saving["no_gil"], saving["no_core"])
        yield f"{name:<{NAME}} " + " ".join(f"{share:>16.1%}" for share in shares)
    yield ""
    yield "A thread of pure Python counts during a save, without training. Without the GIL: the"
    yield "  share of the save's time in which it waits for the GIL. Without a core: in which other"
    yield "  threads, and other programs, have the cores. Memory bandwidth slows the counting too."
