"""Kill programs of a `CheckpointManager` at random, and check that nothing is lost.

    torture_managers.py                        # 1,000 kills
    torture_managers.py --kills 10 --seed 57   # the 10 kills of one run, that of seed 57

Each seed makes a run with tiers or without, of one process or two ranks, and kills ten programs
that open a manager with random rules, restore, save, keep, release, go back and close. Meanwhile a
user copies and links steps and has files in the run, the clock steps, readers restore, and second
jobs must be refused. After each
kill a fresh process looks: the newest step, each step that the rules keep, every byte of those that
it reads, and the user's files must be there. After a manager has saved once more and closed,
nothing else may be.

Exits with 1 if a promise is broken: then it prints the seed and what led to it, and leaves the
directory. A seed repeats the programs; when they are killed also depends on the machine.
docs/internals/testing.md says what is checked.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ringstow
from torturing.managers import clock, ranks
from torturing.managers.life import Life, Result

KILLS_PER_LIFE = 10
# More would say the same, and each leaves its directory.
BROKEN_MAX = 5
# What each program would import by itself: a forked one has it.
IMPORTED = (ringstow.SaveHandle, ringstow.SaveReport, ringstow.Step)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    os.environ["RINGSTOW_PROGRESS"] = "off"
    time_of_day = clock.found_or_started()
    ranks.load()
    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="torture-managers-"))
    began = time.monotonic()
    results: list[Result] = []
    left = options.kills
    while left > 0 and sum(bool(result.broken) for result in results) < BROKEN_MAX:
        seed = options.seed + len(results)
        results.append(live(seed, folder, min(left, KILLS_PER_LIFE), time_of_day))
        left -= results[-1].kills
    if not any(result.broken for result in results):
        shutil.rmtree(folder)
    return summary(results, folder, time.monotonic() - began)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--dir", type=Path, help="directory for the runs")
    return parser.parse_args(arguments)


def live(seed: int, folder: Path, kills: int, time_of_day: clock.Clock) -> Result:
    """Run one life; remove its directory unless a promise was broken."""
    inside = folder / str(seed)
    inside.mkdir()
    result = Life(seed, inside, time_of_day).live(kills)
    if result.broken:
        say(result, inside)
    else:
        shutil.rmtree(inside)
    return result


def say(result: Result, inside: Path) -> None:
    print(f"BROKEN: seed {result.seed}, after {result.kills} kills, in {inside}")
    for text in [*result.broken, *result.story]:
        print(f"  {text}")
    sys.stdout.flush()


def summary(results: list[Result], folder: Path, seconds: float) -> int:
    within: collections.Counter[str] = collections.Counter()
    for result in results:
        within.update(result.within)
    kills = sum(result.kills for result in results)
    calls = ", ".join(f"{call or 'between calls'} {n}" for call, n in within.most_common())
    print(f"killed within: {calls}")
    print(
        f"{len(results)} runs in {seconds:.0f} s, {60 * kills / seconds:.0f} kills a minute; "
        f"{sum(result.refused for result in results)} second jobs were refused, readers restored "
        f"{sum(result.read for result in results)} times; ringstow {ringstow.__version__}"
    )
    broken = sum(bool(result.broken) for result in results)
    print(
        "promise: a killed program of a manager loses no step, and nothing of the user's: "
        f"{kills} kills, {broken} broken"
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
