"""One run, from its first save to its last kill: programs, kills, and the looks after them."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import ranks, tidy
from .children import Child, Trouble
from .clock import Clock
from .ledger import BEGUN, Line, Lines
from .look import Seen, look
from .oracle import Oracle
from .others import reader, second_job
from .place import Place
from .program import Program
from .rules import Rules
from .user import User

# One program ends by itself after so many calls.
CALLS, CALLS_MAX = 150, 10_000
# A process that takes so long hangs, or the machine is busy beyond use.
HANG_S = 600.0
# The share of programs beside which a second job starts: it waits for five seconds.
SECOND_JOBS = 0.01
READERS = 0.15
LINES_TOLD = 25


@dataclass
class Result:
    """How a life went."""

    seed: int
    kills: int = 0
    within: collections.Counter[str] = field(default_factory=collections.Counter)
    """How many kills came within which call; "" is between two."""
    refused: int = 0
    """Second jobs that were refused."""
    read: int = 0
    """What readers have restored beside a job."""
    broken: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    """If a promise was broken: what led to it."""


class Life:
    """A run whose programs are killed."""

    def __init__(self, seed: int, folder: Path, clock: Clock) -> None:
        self._rng = random.Random(f"life {seed}")
        self._place = Place.of(self._rng, seed, folder)
        self._clock = clock
        self._user = User(self._place, random.Random(f"user {seed}"))
        self._acts: list[str] = []
        self._lines = Lines(self._place.ledger)
        self._done: list[Line] = []
        """What the last program has noted."""
        self._oracle = Oracle()
        self._seen: Seen | None = None
        self._programs = 0
        self.result = Result(seed)

    def live(self, kills: int) -> Result:
        """Start and kill programs, until a promise is broken."""
        try:
            while self.result.kills < kills and not self.result.broken:
                self._kill_one()
                if self._rng.random() < 0.25:
                    self._settle()
            self._settle()
            self._prune()
        except Trouble as trouble:
            self.result.broken.append(f"{trouble}: see {self._place.log}")
        self._clock.reset()
        if self.result.broken:
            self.result.story = self._story()
        return self.result

    # Programs.

    def _kill_one(self) -> None:
        kind = self._rng.choices(["alone", "reader", "second"], [1, READERS, SECOND_JOBS])[0]
        # While a second job waits, the first one must have enough to do, and keep little.
        rules, calls = self._rules(), CALLS
        if kind == "second":
            rules, calls = Rules(last=1), CALLS_MAX
        reopens = kind != "second"
        program = self._start(lambda one: one.train(rules, calls, reopens=reopens))
        try:
            if kind == "second":
                self._refuse_second(program)
            elif kind == "reader":
                self._read_beside(program)
            self._await_moment(program)
        finally:
            program.kill()
        self._end(program)
        if program.wait() < 0 or (isinstance(program, ranks.Ranks) and program.wait()):
            self.result.kills += 1
            self.result.within[_unfinished(self._done)] += 1
        self._compare()

    def _rules(self) -> Rules:
        """Return the rules of the last program, or others."""
        if self._programs and self._rng.random() < 0.6:
            return self._oracle.rules
        return Rules.of(self._rng, has_tiers=bool(self._place.tiers))

    def _start(self, work: Callable[[Program], None]) -> Child | ranks.Ranks:
        self._act_between()
        self._oracle.linked = self._user.linked
        self._programs += 1
        number = self._programs
        self._done = []
        if self._rng.random() < 0.3:
            self._clock.step(self._rng)
        count = self._place.shape.ranks
        if count == 1:
            return self._fork(lambda pipe: work(Program(self._place, number, pipe)))

        def one(rank: int, pipe: int) -> None:
            with ranks.joined(rank, count, self._place.folder, number):
                work(Program(self._place, number, pipe, rank))

        dice = f"ranks {self._place.shape.seed} {number}"
        return ranks.Ranks(one, count, self._place.log, dice)

    def _fork(self, work: Callable[[int], None]) -> Child:
        return Child(work, self._place.log)

    def _await_moment(self, program: Child | ranks.Ranks) -> None:
        """Wait for the moment of the kill; meanwhile do what a user does."""
        lines = program.bytes_said + int(self._rng.expovariate(1 / 12))
        if self._rng.random() < 0.3 and program.await_bytes(lines // 2, HANG_S):
            self._note(f"beside program {self._programs}", self._user.act_beside())
            if self._rng.random() < 0.5:
                self._clock.step(self._rng)
        program.await_bytes(lines, HANG_S)
        if program.last_byte != BEGUN and self._rng.random() < 0.6:
            program.await_bytes(program.bytes_said + 1, HANG_S)
        time.sleep(self._rng.choice([0, 0.002, 0.01, 0.03]) * self._rng.random())

    def _end(self, program: Child | ranks.Ranks) -> None:
        """Take note of what a program has done that is gone."""
        code = program.wait()
        self._oracle.linked = self._user.linked
        lines = self._lines.all_new()
        if isinstance(program, ranks.Ranks) and program.is_killed:
            # A rank may have found that another one is gone.
            code, lines = min(code, 0), [line for line in lines if line["what"] != "program"]
        self._follow(lines)
        if code > 0 and not self._oracle.broken:
            self.result.broken.append(f"a program ended with {code}: see {self._place.log}")
        for line in self._oracle.refused:
            if not self._user.has_had(f"step-{line['step']:08}"):
                self.result.broken.append(f"a save was refused, and nothing is there: {line}")
        self._oracle.refused = []
        self._collect()

    def _follow(self, lines: list[Line]) -> None:
        self._done += lines
        self._oracle.follow(lines)

    def _collect(self) -> None:
        self.result.broken += self._oracle.broken
        self._oracle.broken = []

    # Others beside a program.

    def _refuse_second(self, program: Child | ranks.Ranks) -> None:
        """Start a second job once the first has saved; it must be refused."""
        goes_on = self._advance(program, 2)  # it is open
        while goes_on and not self._oracle.has_saved:
            goes_on = self._advance(program, 1)
        if not goes_on:
            return
        second = self._fork(lambda pipe: second_job(self._place, pipe))
        said = second.answer(HANG_S)
        if not self._advance(program, 1):
            return  # the first one has ended, and so has its right to the run
        if "refused" in said:
            self.result.refused += 1
        else:
            self.result.broken.append(f"a second job was not refused: {said}")

    def _read_beside(self, program: Child | ranks.Ranks) -> None:
        """Start a reader beside the job; it must find the newest step of then, or a later one."""
        if not self._advance(program, self._rng.choice([3, 6, 12])):
            return
        newest = self._oracle.newest
        child = self._fork(lambda pipe: reader(self._place, pipe))
        said: dict[str, Any] = child.answer(HANG_S)
        self._advance(program, 0)
        if "error" in said:
            self.result.broken.append(f"a reader beside the job failed:\n{said['error']}")
        drops = any(line["what"] == "go_back" and line["drops"] for line in self._done)
        self._oracle.check_read(said["read"], None if drops else newest)
        self.result.read += len(said["read"])

    def _advance(self, program: Child | ranks.Ranks, count: int) -> bool:
        """Follow a program for some more lines; return whether it goes on."""
        goes_on = program.await_bytes(program.bytes_said + count, HANG_S)
        self._follow(self._lines.new())
        return goes_on

    # Looks.

    def _compare(self) -> None:
        """Look at the run in a fresh process."""
        if self.result.broken:
            return
        self._seen = self._look()
        self._oracle.perhaps_pinned &= self._place.pinned()
        self._oracle.compare(self._seen)
        self._collect()
        self.result.broken += self._user.lost()

    def _look(self, *, reads_all: bool = False) -> Seen:
        number = self._programs
        child = self._fork(lambda pipe: look(self._place, pipe, number, reads_all=reads_all))
        return Seen.read(child.answer(HANG_S))

    def _settle(self) -> None:
        """Have a manager restore, save once and close, and look whether the run is tidy."""
        if self.result.broken:
            return
        rules = self._oracle.rules
        program = self._start(lambda one: one.settle(rules))
        program.output(HANG_S)
        self._end(program)
        self._compare()
        if not self.result.broken and self._seen is not None:
            self.result.broken += tidy.untidy(self._place, self._oracle, self._user, self._seen)

    def _prune(self) -> None:
        """Prune, and look at every byte of what is left."""
        if self.result.broken:
            return
        child = self._fork(lambda pipe: tidy.prune(self._place, pipe))
        said = child.answer(HANG_S)
        if "error" in said:
            self.result.broken.append(f"prune failed:\n{said['error']}")
            return
        self._seen = self._look(reads_all=True)
        self._oracle.compare(self._seen)
        self._collect()
        self.result.broken += self._user.lost()
        told = said["left"]
        self.result.broken += tidy.left_after_prune(self._place, self._user, self._seen, told)

    # The user.

    def _act_between(self) -> None:
        if self._rng.random() < 0.5:
            steps = {} if self._seen is None else _whole(self._seen)
            self._note(f"before program {self._programs + 1}", self._user.act_between(steps))

    def _note(self, when: str, act: str | None) -> None:
        if act:
            self._acts.append(f"{when}, the user {act}")

    def _story(self) -> list[str]:
        return [
            f"ranks: {self._place.shape.ranks}, tiers: {len(self._place.tiers)}",
            f"config: {self._place.config}",
            f"rules: {self._oracle.rules}",
            *self._acts[-10:],
            *self._lines.last(LINES_TOLD),
        ]


def _whole(seen: Seen) -> dict[str, int]:
    """Return the steps of the run's directory that can be loaded, by name."""
    run = seen.places[0] if seen.places else []
    return {e.name: e.step for e in run if e.status == "committed" and e.step is not None}


def _unfinished(lines: list[Line]) -> str:
    """Return in which call a program was killed."""
    last = lines[-1] if lines else {}
    return str(last["what"]) if last.get("when") == "begin" else ""
