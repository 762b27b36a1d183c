"""How long others hold the GIL while a save runs: one process, no training.

A thread of pure Python counts. It waits for nothing but the GIL, so the kernel's account of it
tells the time without the GIL from the time without a core: what is neither running nor waiting
for a core is waiting for the GIL.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepping.contenders import contender
from stepping.training import WIDTH

IDLE_SECONDS = 0.5


@dataclass(frozen=True)
class Reading:
    """Where the counting thread stands: turns of its loop, and seconds since it began."""

    count: int
    wall: float
    running: float
    queued: float


class Counter:
    """A thread that counts."""

    def __init__(self) -> None:
        self._count = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopping:
            self._count += 1

    def read(self) -> Reading:
        # The first two of three numbers: nanoseconds on a core, nanoseconds in a queue for one.
        account = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text()
        running, queued = (int(word) / 1e9 for word in account.split()[:2])
        return Reading(self._count, time.perf_counter(), running, queued)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopping = True
            self._thread.join()


def shares(before: Reading, after: Reading) -> dict[str, float]:
    """Return the counting rate, and the shares of the time without a core and without the GIL."""
    wall = after.wall - before.wall
    queued = (after.queued - before.queued) / wall
    running = (after.running - before.running) / wall
    return {
        "seconds": wall,
        "rate": (after.count - before.count) / wall,
        "no_core": queued,
        "no_gil": max(0.0, 1 - running - queued),
    }


def make_state(size: float) -> dict[str, Any]:
    """Return weights and moments as of training, without a model."""
    count = max(1, round(size / (12 * WIDTH * WIDTH)))
    return {
        part: {str(n): torch.ones(WIDTH, WIDTH) for n in range(count)}
        for part in ("weight", "exp_avg", "exp_avg_sq")
    }


def measure(name: str, size: float, directory: Path) -> dict[str, Any]:
    """Count without a save and during one, the second of this contender in this process."""
    saves_by, state = contender(name), make_state(size)
    saves_by.save(state, directory / "gil-first")()
    shutil.rmtree(directory / "gil-first", ignore_errors=True)
    counter = Counter()
    path = directory / "gil"
    with counter.counting():
        start = counter.read()
        time.sleep(IDLE_SECONDS)
        begun = counter.read()
        saves_by.save(state, path)()
        ended = counter.read()
    shutil.rmtree(path, ignore_errors=True)
    idle, saving = shares(start, begun), shares(begun, ended)
    return {"idle": idle, "saving": saving, "rate_of_idle": saving["rate"] / idle["rate"]}
