"""What the tools share that measure copies and restores: arguments, state, and tables of rounds."""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TENSORS = 32


class Copied(NamedTuple):
    """One copy: GB a second until it is durable, and seconds of CPU for a GB."""

    speed: float
    cpu: float


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def parser(about: str | None, disk: str) -> argparse.ArgumentParser:
    """Return a parser with the size, the rounds and the directory of a measurement."""
    words = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=about, formatter_class=words)
    made.add_argument("--gb", type=float, default=1.0, help="the checkpoint, 1e9 bytes")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--dir", type=Path, default=Path("."), help=disk)
    return made


def state_of(gb: float) -> dict[str, torch.Tensor]:
    """Return a state of that size, of random numbers."""
    return {f"layers.{n}": torch.randn(int(gb * 1e9 / 4 / TENSORS)) for n in range(TENSORS)}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ranked(what: str, all_rounds: Sequence[dict[str, Copied]]) -> str:
    """Return a table of what each way did, beside the fastest other one of the same round."""
    lines = [
        f"| {what} | GB/s | CPU, s/GB | speed relative to the fastest other in the round |",
        "|---|---|---|---|",
    ]
    for way in all_rounds[0]:
        speed, cpu = ([getattr(one[way], field) for one in all_rounds] for field in Copied._fields)
        others = [max(one[name].speed for name in one if name != way) for one in all_rounds]
        ratios = [one / other for one, other in zip(speed, others, strict=True)]
        lines.append(f"| `{way}` | {spread(speed)} | {spread(cpu)} | {spread(ratios)} |")
    return "\n".join(lines)
