"""Measures how much `save_async` slows down training on the CPU, for each way of staging.

    python tools/background_cost.py                        # 0.3 GB, 9 rounds
    python tools/background_cost.py --gb 2 --rounds 21 --dir /mnt/nvme

A round runs the same training loop once with each way of staging, in random order: one background
save, then a few steps of AdamW. It prints the time of each loop as a ratio to the "unguarded" loop
of the same round, whose save does not keep the values of the call. Then it prints the time of the
call for 1,000 tensors and of reading the versions of 10,000: median and range of all rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ringstow
import torch
from ringstow import _native
from torch import nn

STAGINGS = ("guard", "snapshot", "wait", "unguarded")
WIDTH = 1024
BATCH = 64
# Each weight has two moments.
BYTES_OF_A_LAYER = 3 * 4 * (WIDTH * WIDTH + 5 * WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="background-cost-") as folder:
        measure_loops(options, Path(folder))
        measure_call(options.rounds, Path(folder))
    measure_versions(options.rounds)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument(
        "--gb", type=float, default=0.3, help="size of weights and moments, 1e9 bytes"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="training steps after each save")
    parser.add_argument("--stagings", nargs="+", choices=STAGINGS, default=STAGINGS)
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument("--dir", type=Path, help="directory for the checkpoints")
    return parser.parse_args(arguments)


def measure_loops(options: argparse.Namespace, folder: Path) -> None:
    """Measure training loops with a save in each."""
    layers = max(1, round(options.gb * 1e9 / BYTES_OF_A_LAYER))
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(layers)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def loop(staging: str) -> tuple[float, float]:
        """Return the seconds of the call alone, and of the call plus all steps."""
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        begun = time.perf_counter()
        handle = save_async(state, folder / "loop", staging)
        called = time.perf_counter()
        for _ in range(options.steps):
            step()
        ended = time.perf_counter()
        handle.result()
        return called - begun, ended - begun

    stagings = sorted({*options.stagings, "unguarded"})
    for staging in stagings:  # a warm-up for the pool, the files and torch
        loop(staging)
    order = random.Random(0)
    rounds: list[dict[str, tuple[float, float]]] = []
    for _ in range(options.rounds):
        rounds.append({s: loop(s) for s in order.sample(stagings, len(stagings))})
    base = [one["unguarded"][1] for one in rounds]
    print(f"{layers} layers, {layers * BYTES_OF_A_LAYER / 1e9:.2f} GB, {options.steps} steps")
    for staging in stagings:
        calls = [one[staging][0] * 1e3 for one in rounds]
        ratios = [one[staging][1] / b for one, b in zip(rounds, base, strict=True)]
        print(f"  {staging:10} call {spread(calls, 'ms')}, loop {spread(ratios, 'x')} of unguarded")
    # Two loops of the same kind differ by chance; the ratios above vary as much.
    again = [loop("unguarded")[1] / loop("unguarded")[1] for _ in range(options.rounds)]
    print(f"  unguarded, against itself: loop {spread(again, 'x')}")


def measure_call(rounds: int, folder: Path) -> None:
    """Measure the call for 1,000 tensors; the call copies the small ones."""
    for sizes in ([4 << 10, 128 << 10], [1 << 10, 16 << 10, 64 << 10, 256 << 10]):
        state = {str(n): torch.zeros(sizes[n % len(sizes)] // 4) for n in range(1000)}
        named = ", ".join(f"{size >> 10} KiB" for size in sizes)
        for staging in ("guard", "unguarded"):
            wall, cpu = [], []
            for _ in range(rounds + 1):
                begun, used = time.perf_counter(), time.thread_time()
                handle = save_async(state, folder / "call", staging)
                wall.append((time.perf_counter() - begun) * 1e3)
                cpu.append((time.thread_time() - used) * 1e3)
                handle.result()
            first = "call for 1,000 tensors of"
            print(
                f"{first} {named}, {staging}: {spread(wall[1:], 'ms')}, CPU {spread(cpu[1:], 'ms')}"
            )


def measure_versions(rounds: int) -> None:
    """Measure how long noting and comparing the versions of 10,000 tensors takes."""
    tensors = [(str(n), torch.zeros(16)) for n in range(10_000)]
    note: Any = _native.Watch  # type: ignore[attr-defined,unused-ignore]
    print(f"noting 10,000 versions: {timed(rounds, lambda: note(tensors))}")
    print(f"comparing 10,000 versions: {timed(rounds, note(tensors).changed)}")


def timed(rounds: int, call: Callable[[], Any]) -> str:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begun) * 1e3)
    return spread(seconds, "ms")


def save_async(state: dict[str, Any], path: Path, staging: Any) -> ringstow.SaveHandle:
    return ringstow.save_async(  # type: ignore[call-arg,unused-ignore]
        state, path, staging=staging
    )


def spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}) {unit}"


if __name__ == "__main__":
    sys.exit(main())
