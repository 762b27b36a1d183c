"""Measures copies of a checkpoint to another directory: `ringstow.promote` beside `cp`.

    python tools/promote_speed.py                                     # 1 GB, 5 rounds
    python tools/promote_speed.py --gb 8 --rounds 9 --dir /mnt/nvme --to /mnt/shared --json out.json

Both are durable: the tool syncs what cp has written. The page cache holds none of the files when a
copy begins. `promote` also compares every byte with its checksum. The ratio is that of one round.

    python tools/promote_speed.py --behind 100                        # MB a second

measures what a copy behind it, at such a rate, costs a save: saves with and without one in turns.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ringstow
import torch
from comparing import speed
from comparing.directories import fresh_directory, machine
from comparing.durable import drop_caches, fsync_tree
from comparing.speed import Copied, cpu_seconds, ranked, spread


def promote(source: Path, target: Path) -> None:
    ringstow.promote(source, target)


def cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    fsync_tree(target)


WAYS: dict[str, Callable[[Path, Path], None]] = {"ringstow.promote": promote, "cp -r": cp}


def copied(way: str, source: Path, target: Path, nbytes: int) -> Copied:
    drop_caches(source)
    cpu, began = cpu_seconds(), time.perf_counter()
    WAYS[way](source, target)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    shutil.rmtree(target)
    return Copied(nbytes / seconds / 1e9, cpu * 1e9 / nbytes)


def measure(source: Path, to: Path, rounds: int) -> list[dict[str, Copied]]:
    """Return each round's copies by way, after one round that does not count."""
    nbytes = sum(file.stat().st_size for file in source.iterdir())
    found = []
    for number in range(rounds + 1):
        ways = list(WAYS) if number % 2 else list(reversed(WAYS))
        found.append({way: copied(way, source, to / "copy", nbytes) for way in ways})
    return found[1:]


def saved(state: dict[str, torch.Tensor], target: Path) -> float:
    began = time.perf_counter()
    ringstow.save(state, target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def saves_beside_copies(
    state: dict[str, torch.Tensor], here: Path, there: Path, rate: int, rounds: int
) -> list[tuple[float, float]]:
    """Return each round's seconds of a save alone, and of one while a copy of another runs."""
    some = dict(list(state.items())[: max(1, len(state) // 4)])
    ringstow.save(some, here / "some")
    found = []

    def beside() -> float:
        copy = threading.Thread(
            target=lambda: ringstow.promote(here / "some", there / "copy", rate=rate)
        )
        copy.start()
        time.sleep(0.2)  # it has begun
        seconds = saved(state, here / "again")
        if not copy.is_alive():
            raise SystemExit("the copy ended before the save: give a lower rate, or more --gb")
        copy.join()
        shutil.rmtree(there / "copy")
        return seconds

    for number in range(rounds + 1):
        if number % 2:
            found.append((saved(state, here / "again"), beside()))
        else:
            with_copy = beside()
            found.append((saved(state, here / "again"), with_copy))
    return found[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = speed.parser(__doc__, "the disk to copy from")
    parser.add_argument("--to", type=Path, help="the disk to copy to; the same without it")
    parser.add_argument("--behind", type=int, metavar="MB", help="measure saves beside a copy")
    parser.add_argument("--json", type=Path, help="write the measurements there")
    asked = parser.parse_args(arguments)
    with fresh_directory(asked.dir) as here, fresh_directory(asked.to or asked.dir) as there:
        state = speed.state_of(asked.gb)
        if asked.behind is not None:
            rate = asked.behind * 10**6
            pairs = saves_beside_copies(state, here, there, rate, asked.rounds)
            alone, beside = zip(*pairs, strict=True)
            ratio = spread([one / other for other, one in pairs])
            print(f"save alone, s: {spread(alone)}\nbeside a copy, s: {spread(beside)}")
            print(f"beside, of alone in the round: {ratio}; {machine(there)}")
            return 0
        ringstow.save(state, here / "saved")
        found = measure(here / "saved", there, asked.rounds)
        about = machine(there)
    print(ranked("copy, durable", found))
    print(f"\n{asked.gb} GB, {asked.rounds} rounds, median (lowest to highest), {about}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": about, "copies": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
