"""Measures what a background save costs training.

    python tools/step_time.py                                # 0.3 GB, 3 rounds
    python tools/step_time.py --gb 2 --rounds 9 --dir /mnt/nvme --json result.json
    python tools/step_time.py --trainer lightning            # or transformers
    python tools/step_time.py --gb 1 --step-ms 50 --disk-rate 200   # short steps, a slow disk
    python tools/step_time.py --gb 8 --step-ms 100 --device cuda --contenders ringstow dcp-stager
    python tools/step_time.py --contenders ringstow ringstow-unguarded --no-gil --calls
    python tools/step_time.py --contenders ringstow ringstow:nice=10,io_priority=low --no-gil

Each contender in turn saves in the same training loop; a round has one turn of each, and begins
with another. A turn takes a few steps, saves, and goes on until the save is durable. The time lost
is the time of the call plus what the steps until then took beyond the median step before the call.
Then a process for each contender shows how long a save holds the GIL.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from comparing.about import about
from comparing.directories import check_room, fresh_directory
from comparing.measuring import in_turn
from comparing.processes import CompareFailed, last_json, run_kept, say
from stepping import calls, gil
from stepping.contenders import DCP_STAGER, DCP_THREAD, PLAIN, Row, closing, contender, missing
from stepping.report import Found, gil_table, table
from stepping.slow_disk import slow_disk
from stepping.training import SleepingTrainer, Turn

SECONDS_MAX = 600.0

# The name of each trainer: what it needs, its module and class there, and the contender whose lost
# time is 1. A trainer to add is a module with such a class, and a line here.
TRAINERS = {
    "plain": ((), "stepping.training", "PlainTrainer", DCP_THREAD),
    "lightning": (("lightning",), "stepping.lightning_trainer", "LightningTrainer", "async-io"),
    "transformers": (
        ("transformers", "accelerate"),
        "stepping.transformers_trainer",
        "TransformersTrainer",
        "dcp-callback",
    ),
}


class Trainer(Protocol):
    def turn(self, name: str) -> Turn: ...


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--gb", type=float, default=0.3, help="weights and moments, 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps before each save")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--trainer", choices=TRAINERS, default="plain")
    parser.add_argument(
        "--step-ms", type=float, help="sleep so long in each step in place of the passes"
    )
    parser.add_argument(
        "--disk-rate", type=float, metavar="MB",
        help="save to a disk made for it, of so many 10^6 bytes per second; needs root",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where model and optimizer are: cuda")
    parser.add_argument("--contenders", nargs="+", help="default: all but the other stagings")
    parser.add_argument("--no-gil", action="store_true", help="leave the GIL out")
    parser.add_argument("--calls", action="store_true", help="also time calls for small tensors")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--gil-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.gb <= 0 or options.rounds < 1 or options.steps < 1:
        parser.error("--gb must be positive, --rounds and --steps at least 1")
    if options.step_ms is not None and (options.step_ms <= 0 or options.trainer != "plain"):
        parser.error("--step-ms must be positive, and is for the plain trainer")
    if options.device != "cpu" and options.trainer != "plain":
        parser.error("--device is for the plain trainer")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    try:
        if options.gil_of:
            with fresh_directory(options.dir) as directory, closing:
                say(json.dumps(gil.measure(options.gil_of, options.gb * 1e9, directory)))
            return 0
        found = measure(options)
    except CompareFailed as failure:
        say(f"step_time: {failure}")
        return 1
    say()
    for line in [*table(found), *gil_table(found)]:
        say(line)
    result = {
        **about(options.dir), "gb": options.gb,
        "trainer": options.trainer, "threads": options.threads, "torch": str(torch.__version__),
        "step_ms": options.step_ms, "device": options.device, "disk_rate": options.disk_rate,
    }  # fmt: skip
    say(f"{result['date']}, {options.gb:g} GB, {options.trainer}, {result['machine']}")
    if options.json:
        options.json.write_text(json.dumps(result | found.told(), indent=1))
    return 1 if found.failed or any("failed" in told for told in found.gil.values()) else 0


def measure(options: argparse.Namespace) -> Found:
    size = options.gb * 1e9
    check_room(options.dir, int(2 * size))  # one checkpoint stays while another is saved
    needs, module, kind, base = TRAINERS[options.trainer]
    if reason := missing(needs):
        raise CompareFailed(f"--trainer {options.trainer}: {reason}")
    made = getattr(importlib.import_module(module), kind)
    rows = chosen(made.contenders, options.contenders)
    found = Found(rows, base)
    for name, row in rows.items():
        if reason := missing(row.needs):
            found.skipped[name] = reason
    if options.step_ms:
        made, found.base = partial(SleepingTrainer, seconds=options.step_ms / 1000), DCP_STAGER
    if options.device != "cpu":
        made = partial(made, device=options.device)
    with place(options, size) as directory:
        with closing:
            take_turns(made(size, directory, options.steps), found, options.rounds)
        if options.calls:
            for line in calls.lines(options.rounds, directory):
                say(line)
    if not options.no_gil and options.trainer == "plain" and not options.disk_rate:
        measure_gil(found, options)
    return found


def place(options: argparse.Namespace, size: float) -> AbstractContextManager[Path]:
    """Return the directory to save to: on the disk that is measured, or on a slow one."""
    if options.disk_rate is None:
        return fresh_directory(options.dir)
    return slow_disk(options.dir, int(4 * size) + (256 << 20), int(options.disk_rate * 1e6))


def chosen(rows: dict[str, Row], names: list[str] | None) -> dict[str, Row]:
    if rows is PLAIN:
        rows = {**rows, **{n: contender(n) for n in names or [] if n.startswith("ringstow:")}}
    unknown = [name for name in names or [] if name not in rows]
    if unknown:
        raise CompareFailed(f"no contender {', '.join(unknown)}; there are {', '.join(rows)}")
    if names:
        return {name: rows[name] for name in names}
    return {name: row for name, row in rows.items() if row.by_default}


def take_turns(trainer: Trainer, found: Found, rounds: int) -> None:
    """Give each contender an unmeasured turn, which makes pools and processes, then the rounds."""
    names = [name for name in found.rows if name not in found.skipped]
    for number in range(-1, rounds):
        turns: dict[str, Turn] = {}
        for name in in_turn(names, max(number, 0)):
            if name in found.failed:
                continue
            try:
                turns[name] = trainer.turn(name)
            except Exception as error:
                found.failed[name] = first_line(error)
                say(f"  {name}: failed: {found.failed[name]}")
        if number >= 0:
            found.turns.append(turns)
        which = f"round {number + 1}/{rounds}" if number >= 0 else "first saves, not counted"
        told = ", ".join(f"{name} {turn.lost:.2f}" for name, turn in turns.items())
        say(f"  {which}: seconds lost: {told}")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def measure_gil(found: Found, options: argparse.Namespace) -> None:
    """Measure the GIL in a process of its own for each contender that saves in this process."""
    for name in found.rows:
        if name in found.skipped or name in found.failed or not contender(name).in_background:
            continue
        found.gil[name] = gil_of(name, options)


def gil_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with fresh_directory(options.dir) as directory:
        command = [sys.executable, str(Path(__file__).resolve()), "--gil-of", name]
        command += ["--gb", str(options.gb), "--dir", str(directory)]
        code, text = run_kept(command, directory / "log", SECONDS_MAX)
    answer = last_json(text)
    if answer is None:
        return {"failed": (text.strip().splitlines() or [f"exit code {code}"])[-1]}
    return answer


if __name__ == "__main__":
    sys.exit(main())
