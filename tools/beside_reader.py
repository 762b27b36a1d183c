"""Measures what a save leaves to a data loader that reads from the same disk.

    python tools/beside_reader.py                            # 1 GB, 3 rounds
    python tools/beside_reader.py --dir /mnt/nvme --rows ringstow ringstow:write_rate=500M

A row is `alone`, `ringstow`, or that with settings. In each round and row fio reads 128 KiB at
random places, one after another, bypassing the page cache, while ringstow saves again and again,
durably.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from comparing.directories import check_room, fresh_directory, machine
from comparing.fio import run_job
from comparing.measuring import in_turn
from comparing.processes import CompareFailed, say
from comparing.table import spread
from stepping.contenders import settings_of

ALONE = "alone"
ROWS = (
    ALONE,
    "ringstow",
    "ringstow:io_priority=low",
    "ringstow:io_priority=idle",
    "ringstow:write_rate=500M",
)
TENSORS = 16
READER = "--ioengine=psync --bs=128k --time_based --direct=1"


class Turn(NamedTuple):
    """What fio read during saves, and how fast these were."""

    reads_per_second: float
    slowest_ms: float  # of the fastest 99 % of the reads
    save_gb_per_second: float | None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--gb", type=float, default=1, help="of the state and of the file read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="that fio reads in each turn")
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size = int(options.gb * 1e9)
    rows: dict[str, list[Turn]] = {name: [] for name in options.rows}
    try:
        check_room(options.dir, 3 * size)  # two checkpoints and the file
        with fresh_directory(options.dir) as directory:
            run_job("write", size, f"--filename={directory / 'read'}")
            state = {f"t{n}": np.full(size // TENSORS, n, np.uint8) for n in range(TENSORS)}
            for number in range(options.rounds):
                for name in in_turn(list(rows), number):
                    rows[name].append(turn(name, state, directory, options.seconds))
                    say(f"  round {number + 1}/{options.rounds}: {name}: {rows[name][-1]}")
    except CompareFailed as failure:
        say(f"beside_reader: {failure}")
        return 1
    say()
    for line in table(rows):
        say(line)
    say(f"{time.strftime('%Y-%m-%d')}, {options.gb:g} GB, {machine(options.dir)}")
    return 0


def turn(name: str, state: dict[str, Any], directory: Path, seconds: float) -> Turn:
    import ringstow

    config = ringstow.Config(**settings_of(name))
    speeds: list[float] = []
    begun, stop = threading.Event(), threading.Event()

    def save() -> None:
        while not stop.is_set():
            begun.set()
            report = ringstow.save(state, directory / "checkpoint", config=config)
            speeds.append(report.file_bytes / 1e9 / report.seconds.total)

    saver = threading.Thread(target=save)
    if name != ALONE:
        saver.start()
        begun.wait()
    size = (directory / "read").stat().st_size
    reading = [f"--filename={directory / 'read'}", *READER.split(), f"--runtime={seconds}"]
    try:
        job = run_job("randread", size, *reading)["read"]
    finally:
        stop.set()
        if name != ALONE:
            saver.join()
    if name != ALONE and not speeds:
        raise CompareFailed(f"{name}: no save ended well beside the reads; see above")
    slowest = job["clat_ns"]["percentile"]["99.000000"] / 1e6
    return Turn(job["iops"], slowest, statistics.median(speeds) if speeds else None)


def table(rows: dict[str, list[Turn]]) -> list[str]:
    lines = [f"{'':<28} {'reads/s':>26} {'99 % within, ms':>24} {'save, GB/s':>18}"]
    for name, turns in rows.items():
        cells = (
            spread([turn.reads_per_second for turn in turns]),
            spread([turn.slowest_ms for turn in turns]),
            spread([turn.save_gb_per_second for turn in turns if turn.save_gb_per_second]),
        )
        lines.append(f"{name:<28} {cells[0]:>26} {cells[1]:>24} {cells[2]:>18}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
