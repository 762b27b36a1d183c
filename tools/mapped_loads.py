"""Measures mapped loads beside safetensors', and loads that stack experts beside torch's stacking.

    python tools/mapped_loads.py --gb 4 --rounds 5

Mapped loads are of a warm file, loads that stack are cold. All ways of one checkpoint take turns,
in random order.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ringstow
import torch
from comparing import speed
from comparing.directories import fresh_directory, machine
from comparing.durable import drop_caches, files_under
from safetensors.torch import load_file

Act = Callable[[], object]
LAYERS, EXPERTS, WIDE = 4, 16, 1024
STACK = {
    ("e.*.gate", "e.*.up"): ringstow.Stack(ringstow.Concat("e.gate_up", dim=1)),
    "e.*.down": ringstow.Stack("e.down"),
}


def mapped(path: Path, gb: float) -> tuple[Act, dict[str, Act]]:
    """Return the ways to load a model of large tensors, and what to do before each."""
    count = int(gb * 1e9) >> 23
    state = {f"w{n}": torch.full((1 << 22,), n, dtype=torch.bfloat16) for n in range(count)}
    ringstow.save(state, path)
    del state
    shards = [str(file) for file in files_under(path) if file.suffix == ".safetensors"]
    for shard in shards:
        with open(shard, "rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass

    def in_background() -> None:
        loaded = ringstow.load(path, mmap=True, verify="background")
        assert isinstance(loaded, ringstow.MappedState)
        waiting.append(loaded)

    def wait() -> None:
        while waiting:
            waiting.pop().wait_verified()

    waiting: list[ringstow.MappedState] = []
    return wait, {
        "mmap=True, verify=False": lambda: ringstow.load(path, mmap=True, verify=False),
        'mmap=True, verify="background"': in_background,
        "mmap=True": lambda: ringstow.load(path, mmap=True),
        "safetensors.torch.load_file": lambda: [load_file(shard) for shard in shards],
    }


def stacked(path: Path, gb: float) -> tuple[Act, dict[str, Act]]:
    """Return the ways to load one tensor an expert, and what to do before each."""
    rows = int(gb * 1e9) // (LAYERS * EXPERTS * 3 * WIDE * 4)
    names = [f"l{n}.e.{e}." for n in range(LAYERS) for e in range(EXPERTS)]
    apart = {f"{one}{kind}": torch.rand(rows, WIDE) for one in names for kind in ("gate", "up")}
    apart |= {f"{one}down": torch.rand(WIDE, rows) for one in names}
    ringstow.save(apart, path)
    fused = {f"l{n}.e.gate_up": torch.zeros(EXPERTS, 2 * rows, WIDE) for n in range(LAYERS)}
    fused |= {f"l{n}.e.down": torch.zeros(EXPERTS, WIDE, rows) for n in range(LAYERS)}

    def by_torch() -> None:
        ringstow.load_into(apart, path)
        for n in range(LAYERS):
            gate, up, down = (
                torch.stack([apart[f"l{n}.e.{e}.{kind}"] for e in range(EXPERTS)])
                for kind in ("gate", "up", "down")
            )
            fused[f"l{n}.e.gate_up"].copy_(torch.cat([gate, up], 1))
            fused[f"l{n}.e.down"].copy_(down)

    return lambda: drop_caches(path), {
        "as it is": lambda: ringstow.load_into(apart, path),
        "stacked by rename=": lambda: ringstow.load_into(fused, path, rename=STACK),
        "stacked by torch after the load": by_torch,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = speed.parser(__doc__, "directory on the disk to measure")
    parser.set_defaults(gb=1.0, rounds=5)
    args = parser.parse_args(arguments)
    print(f"{args.gb} GB, {args.rounds} rounds; {machine(args.dir)}; median (lowest-highest), ms\n")
    print("| load | ms |\n|---|---|")
    with fresh_directory(args.dir) as disk:
        for before, ways in (mapped(disk / "m", args.gb), stacked(disk / "s", args.gb)):
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(args.rounds + 1):
                for name in random.Random(number).sample([*ways], len(ways)):
                    before()
                    began = time.perf_counter()
                    ways[name]()
                    if number:  # the first round starts engines and takes memory
                        seconds[name].append(1000 * (time.perf_counter() - began))
            for name, taken in seconds.items():
                middle = statistics.median(taken)
                print(f"| {name} | {middle:.1f} ({min(taken):.1f}-{max(taken):.1f}) |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
