"""What a fresh process finds in a run: steps, their bytes, and what it restores."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import traceback
from pathlib import Path
from typing import Any

import ringstow

from .place import Place, label, log_to_stderr
from .rules import Rules

# Steps of each place whose bytes are read; the newest is always among them.
READ_MAX = 3


@dataclasses.dataclass
class Entry:
    """A step in one place."""

    name: str
    step: int | None
    save: int | None
    status: str
    problem: str | None
    dropped: list[str]
    wrong: list[str] | None = None
    """Names that differ from what was saved, or what a check has found; None if it was not read."""


@dataclasses.dataclass
class Seen:
    """All that was found."""

    places: list[list[Entry]]
    """The steps of the run's directory and of each tier, oldest first."""
    latest: str | None
    """The name of what `ringstow.latest` of the run's directory returns."""
    restored: dict[str, Any] | None
    error: str | None = None

    @classmethod
    def read(cls, values: dict[str, Any]) -> Seen:
        """Read what `look` has written."""
        values["places"] = [[Entry(**one) for one in place] for place in values["places"]]
        return cls(**values)


def look(place: Place, pipe: int, number: int, *, reads_all: bool = False) -> None:
    """Look at a run, in a fresh process, and write what is there to the pipe."""
    log_to_stderr()
    rng = random.Random(f"look {place.shape.seed} {number}")
    seen = Seen([], None, None)
    try:
        for root in (place.run, *place.tiers):
            seen.places.append(_entries(place, root, rng, None if reads_all else READ_MAX))
        latest = ringstow.latest(place.run)
        seen.latest = None if latest is None else os.path.basename(latest)
        # Last: it goes on with copies that a kill has cut short.
        seen.restored = _restored(place)
    except BaseException:
        seen.error = traceback.format_exc()
    os.write(pipe, json.dumps(dataclasses.asdict(seen)).encode())


def _restored(place: Place) -> dict[str, Any] | None:
    # Rules that remove nothing, here or on the tiers.
    restored = place.manager(Rules()).restore()
    if restored is None:
        return None
    wrong = place.shape.wrong(restored.state, restored.dropped)
    return {**label(restored.metrics, restored.step), "wrong": wrong}


def _entries(place: Place, root: Path, rng: random.Random, most: int | None) -> list[Entry]:
    """Return the steps in a directory; read the newest, and some of the others."""
    found = ringstow.steps(root)
    entries = [_entry(step) for step in found]
    whole = [at for at, step in enumerate(found) if step.status == "committed"]
    chosen = set(whole if most is None or len(whole) <= most else rng.sample(whole, most))
    for at in sorted(chosen | set(whole[-1:])):
        entries[at].wrong = _wrong(place, found[at])
    return entries


def _entry(step: ringstow.Step) -> Entry:
    name = os.path.basename(step.path)
    save = label(step.metrics, step.step)["save"]
    return Entry(name, step.step, save, step.status, step.problem, list(step.dropped))


def _wrong(place: Place, step: ringstow.Step) -> list[str]:
    """Load and verify a step; return what is wrong with it."""
    try:
        report = ringstow.verify(step.path)
        wrong = [] if report.ok else [f"verify: {report.damage}"]
        loaded = ringstow.load(step.path, config=place.config)
        wrong += place.shape.wrong(loaded, step.dropped)
        note = loaded.get("note", {})
        if label(step.metrics, step.step) != {"step": note.get("step"), "save": note.get("save")}:
            wrong.append(f"its manifest says {step}, its state {note}")
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return wrong
