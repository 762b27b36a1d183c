"""The same loop in Lightning's Trainer: its own plugins beside ringstow's."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparing.durable import fsync_path
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from ringstow.integrations.lightning import RingstowCheckpointIO
from torch.utils.data import DataLoader, IterableDataset

from stepping.contenders import ADDED, ADDED_IN_CALL, OWN, Row
from stepping.training import BATCH, WIDTH, Turn, make_model


class SyncedIO(TorchCheckpointIO):
    """Lightning's own plugin, and the syncs that it leaves out."""

    ended: float | None = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        fsync_path(Path(path))
        fsync_path(Path(path).parent)
        self.ended = time.perf_counter()


Done = Callable[[Path], float | None]
"""Tells when the save was durable, or None if it is not yet."""


def ringstow_io() -> tuple[CheckpointIO, Done]:
    # Asked after each step, so the time is that of the step's end. The manifest is the commit; the
    # sync of the directory follows it, and is not waited for.
    return RingstowCheckpointIO(), committed


def committed(path: Path) -> float | None:
    return time.perf_counter() if (path / "manifest.json").exists() else None


def async_io() -> tuple[CheckpointIO, Done]:
    inner = SyncedIO()
    return AsyncCheckpointIO(inner), lambda path: inner.ended


def stock_io() -> tuple[CheckpointIO, Done]:
    inner = SyncedIO()
    return inner, lambda path: inner.ended


@dataclass(frozen=True)
class Plugin(Row):
    make: Callable[[], tuple[CheckpointIO, Done]]


class Module(LightningModule):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.model = make_model(size)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.randn(BATCH, WIDTH)
        while True:
            yield batch


class Watch(Callback):
    """Times the steps, saves once, and stops the Trainer when that save is durable."""

    def __init__(self, path: Path, done: Done, quiet_steps: int) -> None:
        self._path = path
        self._done = done
        self._quiet_steps = quiet_steps
        self._mark: float | None = None  # when the step began
        self._begun = 0.0
        self.quiet: list[float] = []
        self.blocked: float | None = None
        self.steps: list[float] = []
        self.save = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._mark is not None:  # the first step makes the moments
            (self.quiet if self.blocked is None else self.steps).append(now - self._mark)
        if self.blocked is None and len(self.quiet) == self._quiet_steps:
            self._begun = time.perf_counter()
            trainer.save_checkpoint(self._path)
            self.blocked = time.perf_counter() - self._begun
        if self.blocked is not None and (ended := self._done(self._path)) is not None:
            self.save = ended - self._begun
            trainer.should_stop = True
        self._mark = time.perf_counter()


class LightningTrainer:
    """`Trainer.fit` with one `Trainer.save_checkpoint` in it: a Trainer for each turn.

    ringstow's checkpoint before it stays, as in training: the plugin saves the first of a directory
    before it returns, and the later ones in the background.
    """

    contenders: Mapping[str, Plugin] = {
        "ringstow": Plugin(("ringstow",), OWN, ringstow_io),
        "async-io": Plugin(("lightning",), ADDED, async_io),
        "torch.save": Plugin(("lightning",), ADDED_IN_CALL, stock_io),
    }

    def __init__(self, size: float, directory: Path, quiet_steps: int) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        self._module = Module(size)
        self._directory = directory
        self._quiet_steps = quiet_steps
        self._count = 0

    def turn(self, name: str) -> Turn:
        """Train, save by the plugin, and train until the save is durable."""
        plugin, done = self.contenders[name].make()
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        earlier = list(folder.iterdir())
        self._count += 1
        watch = Watch(folder / f"{self._count}.ckpt", done, self._quiet_steps)
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
            plugins=[plugin], default_root_dir=folder,
        )  # fmt: skip
        os.sync()
        trainer.fit(self._module, DataLoader(Batches(), batch_size=None))
        for path in earlier:
            shutil.rmtree(path)
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        assert watch.blocked is not None
        return Turn(watch.quiet, watch.blocked, watch.steps, watch.save)
