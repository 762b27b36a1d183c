"""A run of Lightning's Trainer whose every value depends on its step alone."""

from __future__ import annotations

import logging
import os
import warnings

import lightning.pytorch as lightning
import torch
from held_save import LARGE, ONE
from lightning.pytorch.callbacks import ModelCheckpoint

import ringstow
from ringstow.integrations.lightning import RingstowCheckpointIO

WIDTH = 192  # a weight is larger than what a background save copies at the call
BATCHES = 6  # in an epoch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Model(lightning.LightningModule):
    def __init__(self, width=WIDTH, rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )

    def loss(self, seed):
        chance = torch.Generator().manual_seed(seed)
        return self.net(torch.randn(8, self.hparams.width, generator=chance)).square().mean()

    def training_step(self, batch, index):
        return self.loss(self.global_step)

    def validation_step(self, batch, index):
        # Not falling: the best checkpoint is not the newest.
        self.log("score", torch.tensor(float(self.current_epoch % 3)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(BATCHES))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(1))


def trainer(root, *callbacks, io=None, epochs=3, **options):
    """Return a Trainer that saves through ``io``; through Lightning's own plugin if it is None."""
    return lightning.Trainer(
        **{
            "default_root_dir": os.fspath(root),
            "plugins": [] if io is None else [io],
            "callbacks": list(callbacks),
            "max_epochs": epochs,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def model(**options):
    lightning.seed_everything(1, verbose=False)
    return Model(**options)


def fit(root, io=None, *, epochs=3, ckpt_path=None, on_save=None, **checkpoints):
    """Train, with one ModelCheckpoint in ``root``; return the Trainer."""
    one = model()
    if on_save is not None:
        one.on_save_checkpoint = on_save
    run = trainer(root, ModelCheckpoint(dirpath=root, **checkpoints), io=io, epochs=epochs)
    run.fit(one, ckpt_path=ckpt_path)
    return run


def state(run):
    """Return all that a run has learned."""
    optimizer = run.optimizers[0].state_dict()
    return {"model": run.lightning_module.state_dict(), "optimizer": optimizer}


def saved(path, **state):
    io = RingstowCheckpointIO(background=False)
    io.save_checkpoint({"state_dict": {"w": torch.arange(4.0)}, "global_step": 3, **state}, path)
    return path


def in_flight(held, folder, **options):
    """Return a plugin whose save of ``new-2.ckpt`` is in flight, beside ``old-1.ckpt``."""
    saved(folder / "old-1.ckpt")
    io = RingstowCheckpointIO(config=ONE, **options)
    io.save_checkpoint({"state_dict": held.state({"w": torch.zeros(LARGE)})}, folder / "new-2.ckpt")
    assert not (folder / "new-2.ckpt" / "manifest.json").exists()
    return io


__all__ = [
    "BATCHES",
    "Model",
    "ModelCheckpoint",
    "RingstowCheckpointIO",
    "fit",
    "in_flight",
    "lightning",
    "model",
    "ringstow",
    "saved",
    "state",
    "trainer",
]
