"""The time of `save_async` for 1,000 small tensors, and of noting the versions of 10,000."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ringstow
import torch
from ringstow import _native
from ringstow._saving._guard import Staging

STAGINGS: tuple[Staging, ...] = ("guard", "unguarded")


def lines(rounds: int, folder: Path) -> Iterator[str]:
    yield from call_lines(rounds, folder)
    yield from version_lines(rounds)


def call_lines(rounds: int, folder: Path) -> Iterator[str]:
    """Measure the call for 1,000 tensors; the guard copies the small ones."""
    for sizes in ([4 << 10, 128 << 10], [1 << 10, 16 << 10, 64 << 10, 256 << 10]):
        state = {str(n): torch.zeros(sizes[n % len(sizes)] // 4) for n in range(1000)}
        named = ", ".join(f"{size >> 10} KiB" for size in sizes)
        for staging in STAGINGS:
            wall, cpu = [], []
            for _ in range(rounds + 1):
                begun, used = time.perf_counter(), time.thread_time()
                handle = ringstow.save_async(state, folder / "call", staging=staging)
                wall.append((time.perf_counter() - begun) * 1e3)
                cpu.append((time.thread_time() - used) * 1e3)
                handle.result()
            told = f"{spread(wall[1:])}, CPU {spread(cpu[1:])}"
            yield f"call for 1,000 tensors of {named}, {staging}: {told}"
    shutil.rmtree(folder / "call", ignore_errors=True)


def version_lines(rounds: int) -> Iterator[str]:
    tensors = [(str(n), torch.zeros(16)) for n in range(10_000)]
    note: Any = _native.Watch  # type: ignore[attr-defined,unused-ignore]
    yield f"noting 10,000 versions: {timed(rounds, lambda: note(tensors))}"
    yield f"comparing 10,000 versions: {timed(rounds, note(tensors).changed)}"


def timed(rounds: int, call: Callable[[], Any]) -> str:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begun) * 1e3)
    return spread(seconds)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}) ms"
