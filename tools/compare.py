"""Compare ringstow with other libraries: same state, same disk, interleaved rounds.

    python tools/compare.py                     # 1 GB, 3 rounds, in the current directory's disk
    python tools/compare.py --gb 4 --dir /mnt/nvme --out result
    python tools/compare.py --nothing-installed --peers torch.save dcp
    python tools/compare.py --small --gb 0.4    # 100,000 tensors of 4 KiB
    python tools/compare.py --state llama3-8b   # one rank's share of a known model
    python tools/compare.py --tensors 1000 10000 100000 1000000  # cost against their number
    python tools/compare.py --used-memory       # no memory is free, as on a machine in use
    python tools/compare.py --device cuda       # tensors on a GPU

A save or load that takes longer than --seconds is a row that says so.
Each measurement runs in its own process (comparing/worker.py) and in a new directory, which is then
removed. A peer that the project's environment lacks gets its own environment under .peers/.
Saves are durable. Loads are cold, and their bytes are compared with what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from comparing import chart, counts, fio
from comparing.about import about
from comparing.directories import check_room
from comparing.environments import Environment, environment_of, prepared
from comparing.measuring import Bench, Rounds, Row, measure_rounds, needs_nothing
from comparing.memory import page_cache
from comparing.peer import CPU
from comparing.peers import OURS, PEERS
from comparing.processes import CompareFailed, run_kept, say
from comparing.table import summary, table
from gpu_machine import nvidia_smi

DEFAULT_PEERS = [name for name, peer in PEERS.items() if peer.by_default]
CHART_SECONDS_MAX = 120.0
NOTES = {
    "transformer": "",
    "small": "only tensors of 4 KiB",
    "llama3-8b": "one rank's share of the training state of Llama 3 8B, sharded by rows",
}
"""What the table says of each of `comparing.state.STATES`, which needs torch."""


def prepare_all(rounds: Rounds, out: Path, seconds_max: float) -> dict[str, Environment]:
    """Prepare every peer's environment, and note in `rounds` which peers fail and why.

    This runs before the first measurement, so that no installation disturbs one.
    """
    found = {}
    for name in rounds.names:
        peer = PEERS[name]
        if not needs_nothing(peer):
            say(f"  preparing {name}: {', '.join(peer.requirements)}")
        try:
            found[name] = prepared(name, peer, out / "logs" / f"{name}.log", seconds_max)
        except CompareFailed as failure:
            rounds.failed[name] = str(failure)
            say(f"  {name} is left out: {failure}")
            continue
        rounds.versions[name] = found[name].version
    return found


def as_json(rounds: Rounds, args: argparse.Namespace) -> dict[str, Any]:
    return about(args.dir) | {
        "gb": args.gb,
        "state": args.state,
        "device": args.device,
        "used_memory": args.used_memory,
        "versions": rounds.versions,
        "failed": rounds.failed,
        "stopped": rounds.stopped,
        "summary": summary(rounds),
        "rounds": rounds.done,
    }


def write_json(result: Any, args: argparse.Namespace) -> None:
    text = json.dumps(result, indent=1)
    for file in [args.out / "result.json", *([args.json] if args.json else [])]:
        file.write_text(text)


def draw_chart(args: argparse.Namespace) -> None:
    """Draw the chart in an environment with matplotlib, or print why that is impossible."""
    log = args.out / "logs" / "chart.log"
    try:
        where = environment_of(chart.REQUIREMENTS, log, args.install_seconds)
        variables = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        files = [str(args.out / "result.json"), str(args.out / "result.png")]
        command = [where.python, "-m", "comparing.chart", *files]
        code, output = run_kept(command, log, CHART_SECONDS_MAX, variables)
        if code != 0:
            raise CompareFailed((output.strip().splitlines() or ["no output"])[-1])
    except CompareFailed as failure:
        say(f"no chart: {failure}")


def choose(args: argparse.Namespace) -> list[str]:
    names = [*args.peers]
    if args.nothing_installed:
        names = [name for name in names if needs_nothing(PEERS[name])]
    if args.device != CPU:
        names = [name for name in names if PEERS[name].gpu]
    return names


def nothing_chosen(args: argparse.Namespace) -> str:
    if args.device != CPU and not any(PEERS[name].gpu for name in args.peers):
        return f"none of these peers loads onto {args.device}"
    return "none of these peers is installed; run without --nothing-installed"


def measure_all(rounds: Rounds, bench: Bench, args: argparse.Namespace) -> bool:
    """Measure all rounds. Return False after Ctrl-C, which keeps the finished rounds."""

    def measure(name: str, number: int) -> Row:
        if name == fio.FIO:
            return fio.measure_fio(bench)
        return bench.measure(name, check=number == 0)

    try:
        for after in measure_rounds(rounds, args.rounds, measure):
            write_json(as_json(after, args), args)
    except KeyboardInterrupt:
        say(f"\n  interrupted: {len(rounds.done)} of {args.rounds} rounds were finished")
        return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ringstow and its peers on the same state.")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state, 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument(
        "--out", type=Path, default=Path("compare-out"),
        help="directory for table.txt, result.json, result.png and logs/",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), default=DEFAULT_PEERS, metavar="PEER",
        help="any of: " + ", ".join(PEERS),
    )  # fmt: skip
    parser.add_argument(
        "--nothing-installed", action="store_true",
        help="only peers that the project's environment already has, and no chart",
    )  # fmt: skip
    parser.add_argument(
        "--state", choices=list(NOTES), default="transformer",
        help="what is saved. transformer: large matrices and small vectors; small: only tensors of "
        "4 KiB, which measures the cost per tensor, not per byte; llama3-8b: one rank's share "
        "of the training state of Llama 3 8B, sharded over as many ranks as make it --gb",
    )  # fmt: skip
    parser.add_argument(
        "--small", action="store_const", dest="state", const="small", help="--state small"
    )
    parser.add_argument(
        "--tensors", type=int, nargs="+", metavar="N",
        help="only tensors of 4 KiB, N of them: one measurement after the other for each N, and a "
        "table of seconds",
    )  # fmt: skip
    parser.add_argument(
        "--used-memory", action="store_true",
        help="fill the page cache before each measurement, so that no memory is free, as on a "
        "machine that has been in use: memory that a virtual machine's host took back is slow",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=device, default=CPU,
        help="device of the tensors that are saved, and to load onto: cpu, cuda or cuda:N; on a "
        "GPU, only peers that load onto it",
    )  # fmt: skip
    parser.add_argument(
        "--install-seconds", type=float, default=600.0, help="time limit of installing each peer"
    )
    parser.add_argument(
        "--seconds", type=float, default=900.0,
        help="time limit of a save or load; the table then says that it took more, and a peer that "
        "reached it is neither measured again nor with more tensors",
    )  # fmt: skip
    args = parser.parse_args()
    if args.tensors and args.state not in ("transformer", "small"):
        parser.error("--tensors measures tensors of 4 KiB: leave --state out")
    return args


def device(name: str) -> str:
    """Check the name of a device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise argparse.ArgumentTypeError(f"{name!r} is none of cpu, cuda and cuda:N")
    return name


def conditions(args: argparse.Namespace) -> list[str]:
    """Return the table's notes on options that change the measurement."""
    told = []
    if NOTES[args.state]:
        told += [f"State: {NOTES[args.state]}."]
    if args.device != CPU:
        told += [f"Tensors: on {gpu_name(args.device)}; loads end when they are there again."]
    if args.used_memory:
        told += [
            "Memory: the page cache held all memory when a save or load began, as on a machine in",
            "  use. For a cold load, only the checkpoint's files were dropped from the cache.",
        ]
    return told


def gpu_name(device: str) -> str:
    """Return the name of the device's GPU, or of the device if nvidia-smi fails."""
    gpus, number = nvidia_smi(), int(device.partition(":")[2] or 0)
    return " ".join([gpus[number]["name"], device]) if number < len(gpus) else device


def exit_code(rounds: Rounds, finished: bool) -> int:
    """Return the exit code. A peer that is not installed or too slow is only a row in the table."""
    if not finished:
        return 130
    needed = [name for name in rounds.failed if name == fio.FIO or needs_nothing(PEERS[name])]
    ours = [name for name in rounds.stopped if name.startswith(OURS)]
    return 1 if needed or ours else 0


def interrupt(number: int, frame: object) -> None:
    """Handle SIGTERM like Ctrl-C: end the running worker and keep the finished rounds."""
    raise KeyboardInterrupt


def compare(
    args: argparse.Namespace, stopped: Mapping[str, str] | None = None
) -> tuple[Rounds, bool]:
    """Measure one size, and say and write what was found. The flag is false after Ctrl-C.

    `stopped` has the reason for each row that is known to be too slow and is skipped.

    Raises:
        CompareFailed: nothing can be measured.
    """
    state_bytes = round(args.gb * 1e9)
    rounds = Rounds(choose(args), stopped=dict(stopped or {}))
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    if not rounds.names:
        raise CompareFailed(nothing_chosen(args))
    check_room(args.dir, state_bytes)
    environments = prepare_all(rounds, args.out, args.install_seconds)
    if shutil.which(fio.FIO):
        rounds.names.append(fio.FIO)
    else:
        say("  no fio here: the table has no ceiling (Debian, Ubuntu: apt-get install fio)")
    with page_cache(args.dir) if args.used_memory else nullcontext() as cache:
        bench = Bench(
            args.dir, args.out / "logs", state_bytes, args.state, args.seconds, environments,
            args.device, cache,
        )  # fmt: skip
        finished = measure_all(rounds, bench, args)
    told = "\n".join(table(rounds, args.dir, conditions(args)))
    say("\n" + told)
    (args.out / "table.txt").write_text(told + "\n")
    write_json(as_json(rounds, args), args)
    return rounds, finished


def counts_as_json(found: Mapping[int, Rounds], args: argparse.Namespace) -> dict[str, Any]:
    versions = {name: v for rounds in found.values() for name, v in rounds.versions.items()}
    return about(args.dir) | {
        "used_memory": args.used_memory,
        "versions": versions,
        "counts": counts.as_json(found),
    }


def compare_counts(args: argparse.Namespace) -> int:
    """Measure each number of tensors, and return the exit code."""
    found: dict[int, Rounds] = {}
    codes = []
    for count in sorted(set(args.tensors)):  # what is too slow with few is skipped with more
        say(f"\n{count:,} tensors")
        gb, out = count * counts.TENSOR_BYTES / 1e9, args.out / f"{count}-tensors"
        own = argparse.Namespace(
            **vars(args) | {"state": "small", "gb": gb, "out": out, "json": None}
        )
        found[count], finished = compare(own, counts.skipped(found))
        codes.append(exit_code(found[count], finished))
        told = "\n".join(counts.table(found))
        (args.out / "table.txt").write_text(told + "\n")
        write_json(counts_as_json(found, args), args)
        if not finished:
            break
    say("\n" + told)
    return max(codes)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        if args.tensors:
            return compare_counts(args)
        rounds, finished = compare(args)
    except CompareFailed as failure:
        say(f"compare: {failure}")
        return 2
    except KeyboardInterrupt:
        say("\n  interrupted before anything was measured")
        return 130
    if not args.nothing_installed and rounds.done:
        draw_chart(args)
    return exit_code(rounds, finished)


if __name__ == "__main__":
    sys.exit(main())
