"""Measures loads of a checkpoint that is in the page cache, and in /dev/shm, beside a memcpy.

    python tools/warm_loads.py                                   # 0.8 GB, 7 rounds
    python tools/warm_loads.py --beside /old/python --rounds 9   # and an older ringstow, in turns

A row's ratio is the memcpy's seconds to the load's, in one process and round: one thread copies
tensors of the same sizes into the same memory. Cold loads have a row too. Each tree of ringstow has
a process of its own; all load the same two checkpoints, in random order.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import ringstow
import torch
from comparing import speed
from comparing.directories import fresh_directory, machine
from comparing.durable import drop_caches, files_under

MEMORY = Path("/dev/shm")
WORKER = "--worker"


def memcpy(state: dict[str, torch.Tensor], source: dict[str, np.ndarray], _: Path) -> None:
    for name, tensor in state.items():
        np.copyto(tensor.numpy(), source[name])


def load_into(state: dict[str, torch.Tensor], _: dict[str, np.ndarray], path: Path) -> None:
    ringstow.load_into(state, path)


def load(_: dict[str, torch.Tensor], __: dict[str, np.ndarray], path: Path) -> None:
    ringstow.load(path)


ACTS: dict[str, Callable[[dict[str, torch.Tensor], dict[str, np.ndarray], Path], None]] = {
    "memcpy": memcpy,
    "load_into": load_into,
    "load": load,
}
# What a row does, where, and whether the page cache holds it.
ROWS = {
    "warm `load_into`": ("load_into", "disk", True),
    "warm `load`": ("load", "disk", True),
    "`load_into` from /dev/shm": ("load_into", "memory", True),
    "`load` from /dev/shm": ("load", "memory", True),
    "cold `load_into`": ("load_into", "disk", False),
}


def warm(path: Path) -> None:
    for file in files_under(path):
        with open(file, "rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def work(gb: float) -> None:
    """Do what lines of standard input say, and answer each with its seconds."""
    state = speed.state_of(gb)
    source = {name: tensor.numpy().copy() for name, tensor in state.items()}
    for line in sys.stdin:
        act, path = json.loads(line)
        began = time.perf_counter()
        ACTS[act](state, source, Path(path))
        print(time.perf_counter() - began, flush=True)


@contextmanager
def worker(tree: str | None, gb: float) -> Iterator[Callable[[str, Path], float]]:
    environment = dict(os.environ) | ({"PYTHONPATH": tree} if tree else {})
    command = [sys.executable, __file__, WORKER, str(gb)]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        to, answers = process.stdin, process.stdout

        def ask(act: str, path: Path) -> float:
            print(json.dumps([act, str(path)]), file=to, flush=True)
            return float(answers.readline())

        yield ask
        to.close()


def measured(
    ask: Callable[[str, Path], float], row: str, at: dict[str, Path]
) -> tuple[float, float]:
    """Return the seconds of a row's load, and of a memcpy just before it."""
    act, where, is_warm = ROWS[row]
    if is_warm and where == "disk":
        warm(at[where])
    elif not is_warm:
        drop_caches(at[where])
    copied = min(ask("memcpy", at[where]) for _ in range(2))
    return ask(act, at[where]), copied


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    if WORKER in sys.argv:
        work(float(sys.argv[-1]))
        return 0
    parser = speed.parser(__doc__, "directory on the disk to measure")
    parser.add_argument("--beside", help="PYTHONPATH of another tree of ringstow")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.set_defaults(gb=0.8, rounds=7)
    args = parser.parse_args(arguments)
    trees = {"this": None} | ({"beside": args.beside} if args.beside else {})
    with ExitStack() as stack:
        disk = stack.enter_context(fresh_directory(args.dir))
        at = {"disk": disk / "x", "memory": stack.enter_context(fresh_directory(MEMORY)) / "x"}
        state = speed.state_of(args.gb)
        for path in at.values():
            ringstow.save(state, path)
        del state
        asks = {name: stack.enter_context(worker(tree, args.gb)) for name, tree in trees.items()}
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(args.rounds + 1):
            turns = [(row, tree) for row in args.only for tree in asks]
            random.Random(number).shuffle(turns)
            for row, tree in turns:
                one = measured(asks[tree], row, at)
                if number:  # the first round starts engines and takes memory
                    found.setdefault((row, tree), []).append(one)
    print(f"{args.gb} GB, {args.rounds} rounds; {machine(args.dir)}; median and quartiles\n")
    print("| load | ringstow | s | memcpy, s | of a memcpy |")
    print("|---|---|---|---|---|")
    for (row, tree), rounds in sorted(found.items(), key=lambda one: list(ROWS).index(one[0][0])):
        loads, copies = zip(*rounds, strict=True)
        ratios = [copy / load for load, copy in rounds]
        figures = " | ".join(map(quartiles, (loads, copies, ratios)))
        print(f"| {row} | {tree} | {figures} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
