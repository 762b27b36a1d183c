"""The rounds: each measures every peer and fio once, and starts with a different one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comparing.directories import fresh_directory
from comparing.durable import cached_bytes, drop_caches
from comparing.environments import Environment
from comparing.memory import PageCache
from comparing.peer import CPU, Peer
from comparing.peers import PEERS
from comparing.processes import CompareFailed, TimedOut, run_worker, say

Result = dict[str, float]
Row = dict[str, Result]  # "save" and "load", where the peer has them

# The only figure of a save or load that was ended at the time limit.
MORE_THAN = "more_than_seconds"
# A worker also makes the state, warms up and checks the bytes: minutes for a million tensors. None
# of that counts against the time limit of a save or load.
AROUND_SECONDS_MAX = 1800.0


@dataclass
class Rounds:
    """The measurements: a row per name and round, and the reason for each missing one.

    A name in `stopped` works, but was too slow to be measured, or measured again.
    """

    names: list[str]
    done: list[dict[str, Row]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def results(self, name: str, what: str) -> list[Result]:
        """Return what was measured, without a save or load that was ended at the time limit."""
        return [result for row in self.done if (result := measured(row, name, what))]

    def more_than(self, name: str, what: str) -> float | None:
        """Return the time limit at which this save or load was ended, or None."""
        results = [row.get(name, {}).get(what, {}) for row in self.done]
        return max((result[MORE_THAN] for result in results if MORE_THAN in result), default=None)


def measured(row: Mapping[str, Row], name: str, what: str) -> Result | None:
    """Return one figure of a round, or None if there is none or it was ended at the time limit."""
    result = row.get(name, {}).get(what)
    return None if result is None or MORE_THAN in result else result


def speed(result: Result) -> float:
    return result["bytes"] / result["seconds"] / 1e9


@dataclass(frozen=True)
class Bench:
    """Where and how each peer is measured."""

    directory: Path
    logs: Path
    state_bytes: int
    state: str  # a name in `comparing.state.STATES`
    seconds_max: float  # for one save or one load
    environments: Mapping[str, Environment]
    device: str = CPU  # which holds the tensors
    page_cache: PageCache | None = None  # filled just before each measurement

    def worker(self, operation: str, name: str, directory: Path) -> Result:
        where = self.environments[name]
        arguments = [operation, name, str(directory), "--bytes", str(self.state_bytes)]
        arguments += ["--seconds", str(self.seconds_max), "--device", self.device]
        arguments += ["--state", self.state]
        log = self.logs / f"{name}.log"
        stdin = subprocess.DEVNULL
        if self.page_cache:
            arguments.append("--fill-page-cache")
            stdin = self.page_cache.descriptor
        limit = self.seconds_max + AROUND_SECONDS_MAX
        try:
            return run_worker(where.python, arguments, log, limit, where.variables, stdin)
        except TimedOut:
            return {MORE_THAN: self.seconds_max}

    def measure(self, name: str, *, check: bool) -> Row:
        """Measure one save and one cold load.

        `check`: also load where another row reports the load, to check the bytes.
        """
        peer = PEERS[name]
        row: Row = {}
        with fresh_directory(self.directory) as directory:
            saved = self.worker("save", name, directory)
            if peer.begin is not None and peer.saves_as is None:
                row["save"] = saved
            if MORE_THAN in saved:
                return {"save": saved}
            if peer.load is not None and (peer.loads_as is None or check):
                loaded = self.cold_load(name, directory)
                # A load that was ended was not checked either, so its row says so.
                if peer.loads_as is None or MORE_THAN in loaded:
                    row["load"] = loaded
        return row

    def settle(self) -> None:
        """Flush dirty pages and fill the page cache, as a worker does before it measures."""
        os.sync()
        if self.page_cache:
            self.page_cache.fill()

    def make_cold(self, directory: Path) -> None:
        drop_caches(directory, all_files=self.page_cache is None)

    def cold_load(self, name: str, directory: Path) -> Result:
        self.make_cold(directory)
        warm = cached_bytes(directory)
        return self.worker("load", name, directory) | {"cached_bytes_before": warm}


def in_turn(names: list[str], number: int) -> list[str]:
    """Rotate the names, so that each round starts with a different row."""
    shift = number % len(names)
    return names[shift:] + names[:shift]


def measure_round(
    rounds: Rounds, number: int, measure: Callable[[str, int], Row], say_as: str
) -> dict[str, Row]:
    """Measure a row for each name that has not failed; print and keep each failure."""
    found: dict[str, Row] = {}
    for name in in_turn(rounds.names, number):
        if name in rounds.failed or name in rounds.stopped:
            continue
        try:
            found[name] = measure(name, number)
        except CompareFailed as failure:
            rounds.failed[name] = str(failure)
            say(f"  {say_as}  {name:<25} failed: {failure}")
            continue
        if slow := [what for what, result in found[name].items() if MORE_THAN in result]:
            rounds.stopped[name] = too_slow(slow[0], found[name][slow[0]])
        told = ", ".join(figure(what, result) for what, result in found[name].items())
        say(f"  {say_as}  {name:<25} {told}")
    return found


def too_slow(what: str, result: Result) -> str:
    return f"{what} took more than {result[MORE_THAN]:g} s"


def figure(what: str, result: Result) -> str:
    return too_slow(what, result) if MORE_THAN in result else f"{what} {speed(result):.2f} GB/s"


def measure_rounds(
    rounds: Rounds, count: int, measure: Callable[[str, int], Row]
) -> Iterator[Rounds]:
    """Yield the same `rounds` after each finished round.

    An interrupted round leaves the earlier ones unchanged.
    """
    for number in range(count):
        rounds.done.append(measure_round(rounds, number, measure, f"round {number + 1}/{count}"))
        yield rounds


def needs_nothing(peer: Peer) -> bool:
    return not peer.requirements
