"""Medians, ranges and ratios of the rounds, and the table that shows them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from comparing import fio
from comparing.directories import file_system, machine
from comparing.measuring import Result, Rounds, measured, speed
from comparing.peers import OURS, OURS_INTO, OURS_OVER, PEERS

WARM_SHARE_MAX = 0.01  # of a load's bytes that the page cache may still hold
WIDTHS = [25, 17, 5, 17, 5, 5, 5, 17, 6, 9]
HEAD = [
    ["", "durable save", "/fio", "cold load", "/fio", "save", "load", "blocked", "RAM+", "fsync"],
    ["", "GB/s", "", "GB/s", "", "s/GB", "s/GB", "s", "MB", ""],
]


def spread(values: list[float]) -> str:
    """Format as median (lowest-highest)."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def median(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else "-"


def figures(results: list[Result], field: str) -> list[float]:
    return [result[field] for result in results if field in result]


def cpu_per_gb(results: list[Result]) -> list[float]:
    return [result["cpu_seconds"] / result["bytes"] * 1e9 for result in results]


def ratios(rounds: Rounds, what: str, name: str, others: list[str]) -> list[float]:
    """Return, per round, the speed of `name` divided by that of the fastest of the others."""
    found = []
    for row in rounds.done:
        ours = measured(row, name, what)
        speeds = [speed(result) for other in others if (result := measured(row, other, what))]
        if ours and speeds:
            found.append(speed(ours) / max(speeds))
    return found


def made_durable_by(name: str) -> str:
    """Return which side syncs the row's save, or a dash if the row saves nothing."""
    if name == fio.FIO:
        return "own"
    peer = PEERS[name]
    return "-" if peer.begin is None or peer.saves_as else peer.fsync


def table_line(cells: list[str]) -> str:
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], WIDTHS[1:], strict=True))
    return " ".join([f"{cells[0]:<{WIDTHS[0]}}", *rest]).rstrip()


def table_row(name: str, rounds: Rounds) -> list[str]:
    saves, loads = rounds.results(name, "save"), rounds.results(name, "load")
    extra = [value / 1e6 for value in figures(saves, "extra_ram_bytes")]
    return [
        name,
        spread([speed(save) for save in saves]),
        median(ratios(rounds, "save", name, [fio.FIO])),
        spread([speed(load) for load in loads]),
        median(ratios(rounds, "load", name, [fio.FIO])),
        median(cpu_per_gb(saves)),
        median(cpu_per_gb(loads)),
        spread(figures(saves, "blocked_seconds")),
        median(extra, 0),
        made_durable_by(name),
    ]


def rows(rounds: Rounds) -> Iterator[str]:
    for name in rounds.names:
        if any(name in row for row in rounds.done):
            yield table_line(table_row(name, rounds))
        if name in rounds.failed:
            yield f"{name:<{WIDTHS[0]}} FAILED {rounds.failed[name]}"
        if name in rounds.stopped:
            yield f"{name:<{WIDTHS[0]}} STOPPED {rounds.stopped[name]}"


def ratio_lines(rounds: Rounds) -> Iterator[str]:
    """Yield ringstow's ratios to fio and to the best peer.

    Loads into new memory and loads into existing tensors are compared separately, because most
    libraries offer only the former.
    """
    peers = [n for n in rounds.names if n != fio.FIO and not n.startswith(OURS)]
    into = [n for n in peers if PEERS[n].in_place]
    fresh = [n for n in peers if n not in into]
    for label, everyone, like, like_into in [
        (fio.FIO, [fio.FIO], [fio.FIO], [fio.FIO]),
        ("best peer", peers, fresh, into),
    ]:
        told = [
            f"save {spread(ratios(rounds, 'save', OURS, everyone))}",
            f"save over {spread(ratios(rounds, 'save', OURS_OVER, everyone))}",
            f"load {spread(ratios(rounds, 'load', OURS, like))}",
            f"load into {spread(ratios(rounds, 'load', OURS_INTO, like_into))}",
        ]
        yield f"{OURS + ' / ' + label:<21} " + "   ".join(told)


def warm_loads(rounds: Rounds) -> list[str]:
    """Return the rows with a load that found more than 1 % of its bytes in the page cache."""
    return [
        name
        for name in rounds.names
        for load in rounds.results(name, "load")[:1]
        if any(
            one.get("cached_bytes_before", 0) > WARM_SHARE_MAX * one["bytes"]
            for one in rounds.results(name, "load")
        )
    ]


def versions_line(rounds: Rounds) -> str:
    told = {PEERS[name].distribution: version for name, version in rounds.versions.items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(told.items()))


def notes(rounds: Rounds, directory: Path, conditions: Iterable[str]) -> Iterator[str]:
    yield "Median (lowest-highest) over the rounds; /fio: median of the ratios within a round."
    yield "  s/GB: CPU seconds. GB = 1e9 bytes."
    yield "Durable: a save ends when its files and directories are fsync'd. Column fsync: own: the"
    yield "  library syncs; own files: the library syncs files, this harness directories; added:"
    yield "  this harness syncs all. A save of a few MB comes first, unmeasured."
    yield "Cold load: page cache dropped, new process; the loaded bytes are then checked."
    yield (
        "  Rows that load into existing tensors: " + (", ".join(in_place(rounds)) or "none") + "."
    )
    yield from conditions
    yield "CPU: user + system of the process and its children; not the kernel's write-back."
    yield "Blocked: until training may change the weights. RAM+: peak RSS minus RSS before."
    if fio.FIO in rounds.names:
        yield f"fio: {fio.JOB}"
        yield "  --end_fsync=1, writing a new file; then reading it"
    yield from peer_notes(rounds)
    if file_system(directory) == "tmpfs":
        yield "This directory is in memory (tmpfs): no load is cold and no save is durable."
    elif warm := warm_loads(rounds):
        yield "NOT COLD, the page cache could not be dropped: " + ", ".join(warm)
    yield versions_line(rounds)
    yield f"{time.strftime('%Y-%m-%d')}, {machine(directory)}"


def peer_notes(rounds: Rounds) -> Iterator[str]:
    for name in rounds.names:
        if name in PEERS and PEERS[name].note and name not in rounds.failed:
            yield f"{name}: {PEERS[name].note}"


def in_place(rounds: Rounds) -> list[str]:
    return [n for n in rounds.names if n in PEERS and PEERS[n].in_place and not PEERS[n].loads_as]


def table(rounds: Rounds, directory: Path, conditions: Iterable[str] = ()) -> Iterator[str]:
    yield from (table_line(cells) for cells in HEAD)
    yield from rows(rounds)
    yield ""
    if any(OURS in row for row in rounds.done):
        yield from ratio_lines(rounds)
        yield ""
    yield from notes(rounds, directory, conditions)


def summary(rounds: Rounds) -> dict[str, dict[str, Any]]:
    """Return each row's median, lowest and highest GB/s, for the chart and other programs."""
    found: dict[str, dict[str, Any]] = {}
    for name in rounds.names:
        found[name] = {"fsync": made_durable_by(name)}
        for what in ("save", "load"):
            speeds = [speed(result) for result in rounds.results(name, what)]
            if speeds:
                told = [statistics.median(speeds), min(speeds), max(speeds)]
                found[name][f"{what}_gb_s"] = told
                found[name][f"{what}_of_fio"] = ratios(rounds, what, name, [fio.FIO])
    return found
