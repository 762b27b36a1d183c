"""A training loop with one background save in it, and what the save cost that loop."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from comparing.peer import Finish
from torch import nn

from stepping.contenders import PLAIN, Contender, State, contender

WIDTH = 1024
BATCH = 64
# Each weight has two moments.
BYTES_OF_A_LAYER = 3 * 4 * (WIDTH * WIDTH + 5 * WIDTH)


@dataclass(frozen=True)
class Turn:
    """One save in a loop, in seconds: steps before the call, the call, steps until the end."""

    quiet: list[float]
    blocked: float
    steps: list[float]
    save: float

    @property
    def median(self) -> float:
        return statistics.median(self.quiet)

    @property
    def lost(self) -> float:
        """Return the training time that the save took."""
        return self.blocked + sum(step - self.median for step in self.steps)

    @property
    def slowdown(self) -> float | None:
        """Return how many times longer a step took during the save; None without such a step."""
        return statistics.fmean(self.steps) / self.median if self.steps else None

    def told(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median, "lost": self.lost, "slowdown": self.slowdown}


def layers_of(size: float) -> int:
    return max(1, round(size / BYTES_OF_A_LAYER))


def make_model(size: float) -> nn.Sequential:
    """Return a model whose weights and moments have about `size` bytes."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        for _ in range(layers_of(size))
    ]
    return nn.Sequential(*blocks)


def seconds_of(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def ends(finish: Finish) -> float:
    """Wait, and return the time at the end."""
    finish()
    return time.perf_counter()


class PlainTrainer:
    """A loop of plain PyTorch: AdamW with `foreach`, and batch norms."""

    contenders = PLAIN

    def __init__(
        self, size: float, directory: Path, quiet_steps: int, *, device: str = "cpu"
    ) -> None:
        self._device = device
        self._model = make_model(size).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=True)
        self._batch = torch.randn(BATCH, WIDTH, device=device)
        self._directory = directory
        self._quiet_steps = quiet_steps
        self._count = 0
        self._step(nullcontext)  # makes the moments

    def state(self) -> State:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def turn(self, name: str) -> Turn:
        """Train, save by the contender, and train until the save is durable."""
        saves_by = contender(name)
        self._count += 1
        path = self._directory / f"{name}-{self._count}"
        gc.collect()
        os.sync()
        try:
            return self._timed(saves_by, path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _timed(self, saves_by: Contender, path: Path) -> Turn:
        around = saves_by.around_step
        quiet = [seconds_of(lambda: self._step(around)) for _ in range(self._quiet_steps)]
        steps = []
        with ThreadPoolExecutor(1) as waiter:
            begun = time.perf_counter()
            finish = saves_by.save(self.state(), path)
            blocked = time.perf_counter() - begun
            ended = waiter.submit(ends, finish)
            if not saves_by.in_background:
                return Turn(quiet, blocked, [], ended.result() - begun)
            while not ended.done():
                steps.append(seconds_of(lambda: self._step(around)))
            return Turn(quiet, blocked, steps, ended.result() - begun)

    def _step(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._update(around)

    def _update(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        with around():
            self._optimizer.step()
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)  # a step takes as long as the GPU


class SleepingTrainer(PlainTrainer):
    """A loop whose passes take a given time and no core, as a GPU's do, around a real optimizer.

    The optimizer steps the first layer, the other layers are weights without moments.
    """

    def __init__(
        self, size: float, directory: Path, quiet_steps: int, *, seconds: float, device: str = "cpu"
    ) -> None:
        self._seconds = seconds
        super().__init__(3 * size, directory, quiet_steps, device=device)
        for parameter in self._model[0].parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _step(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        time.sleep(self._seconds)
        self._update(around)
