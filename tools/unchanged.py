"""Measures saves of a state of which most tensors never change, as under LoRA.

    python tools/unchanged.py                               # 1 GB, 1 % of it trained, 5 rounds
    python tools/unchanged.py --gb 8 --trained 0.01 --rounds 9 --dir /mnt/nvme --json result.json

Each round changes the trained tensors and saves the state twice, whole and with the round before as
its base, in an order that alternates. Both saves are durable. The ratios are those of the medians.
Two saves before the first round write all: the second moves what has not changed to files of its
own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ringstow
import torch
from comparing.directories import fresh_directory, machine

LAYERS = 32


class Saved(NamedTuple):
    """One save: bytes of the files that it wrote, and seconds until it was durable."""

    nbytes: int
    seconds: float
    compared: float
    """Seconds of these in which tensors were compared with the base."""


def state(nbytes: int, trained: float) -> dict[str, torch.Tensor]:
    """Return LAYERS frozen tensors, and trained ones with two moments each."""
    frozen, adapter = (int(nbytes * part / LAYERS) // 4 for part in (1 - trained, trained / 3))
    tensors = {f"layers.{n}.weight": torch.randn(frozen) for n in range(LAYERS)}
    for name in ("lora", "exp_avg", "exp_avg_sq"):
        tensors |= {f"layers.{n}.{name}": torch.randn(adapter) for n in range(LAYERS)}
    return tensors


def train(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not name.endswith("weight"):
            tensor.add_(1e-3)


def saved(tensors: dict[str, torch.Tensor], path: Path, base: Path | None) -> Saved:
    report = ringstow.save(tensors, path, base=base)
    new = sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)
    return Saved(new, report.seconds.total, report.seconds.compare)


def measure(root: Path, nbytes: int, trained: float, rounds: int) -> dict[str, list[Saved]]:
    """Return the saves of each way, one a round."""
    tensors = state(nbytes, trained)
    ringstow.save(tensors, root / "base", base=ringstow.Base())
    for _ in range(2):
        train(tensors)
        ringstow.save(tensors, root / "base", base=root / "base")
    found: dict[str, list[Saved]] = {"whole": [], "with base": []}
    for number in range(rounds):
        train(tensors)
        ways = ["whole", "with base"]
        for way in ways if number % 2 else reversed(ways):
            path, base = root / "whole", None
            if way == "with base":
                path, base = root / "new", root / "base"
            found[way].append(saved(tensors, path, base))
            if base is None:
                shutil.rmtree(path)  # or the next one would write over its files' space
        ringstow.remove(root / "base")
        os.rename(root / "new", root / "base")
    return found


def table(found: dict[str, list[Saved]]) -> str:
    lines = [
        "| save | bytes | seconds, median (least to most) | comparing, s |",
        "|---|---|---|---|",
    ]
    for way, saves in found.items():
        seconds = sorted(one.seconds for one in saves)
        middle = statistics.median(seconds)
        compared = statistics.median(one.compared for one in saves)
        nbytes = statistics.median(one.nbytes for one in saves)
        lines.append(
            f"| {way} | {nbytes:,.0f} | {middle:.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f}) | "
            f"{compared:.3f} |"
        )
    whole, based = found["whole"], found["with base"]
    ratios = [
        statistics.median(getattr(one, field) for one in based)
        / statistics.median(getattr(one, field) for one in whole)
        for field in ("nbytes", "seconds")
    ]
    lines.append(f"\nwith base / whole: bytes {ratios[0]:.4f}, seconds {ratios[1]:.3f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--gb", type=float, default=1.0, help="the whole state, 1e9 bytes")
    parser.add_argument("--trained", type=float, default=0.01, help="the part that changes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to save")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    nbytes = int(options.gb * 1e9)
    free = shutil.disk_usage(options.dir).free
    if free < 2.5 * nbytes:
        print(f"{options.dir} has {free / 1e9:.1f} GB free; {2.5 * options.gb:.1f} GB are needed")
        return 1
    with fresh_directory(options.dir) as root:
        found = measure(root, nbytes, options.trained, options.rounds)
        print(f"{options.gb:g} GB, {options.trained:.1%} trained, {options.rounds} rounds")
        print(table(found))
        if options.json is not None:
            figures = {way: [one._asdict() for one in saves] for way, saves in found.items()}
            options.json.write_text(json.dumps({"machine": machine(root), **figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
