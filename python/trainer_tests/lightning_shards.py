"""Sharded runs of Lightning: two ranks on the CPU, with gloo.

ModelParallelStrategy (FSDP2) runs there as it is. FSDP (FSDP1) does not: torch has to be told that
the device is the CPU, and Lightning passes a device's number only. `OnCpu` tells torch.
"""

from __future__ import annotations

import children
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning_processes import Begin
from lightning_runs import Model, lightning, trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import ringstow
from ringstow.integrations.lightning import RingstowFSDPStrategy, RingstowModelParallelStrategy

children.preload(__name__)

EVERY = 2  # steps between two saves
STEPS = 10


class Sharded(Model):
    """A model whose every value depends on its step alone, also on other numbers of ranks."""

    def __init__(self, **options):
        super().__init__(**options)
        width = self.hparams.width
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))

    def configure_model(self):
        if self.device_mesh is not None:  # else it is for FSDP, or for one process
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.net, self.net):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch, index):
        seed = self.global_step
        chance = torch.Generator().manual_seed(seed)
        return self.net(torch.randn(8, self.hparams.width, generator=chance)).square().mean()

    def train_dataloader(self):
        ranks = self.trainer.world_size
        return torch.utils.data.DataLoader(torch.arange(6 * ranks))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(self.trainer.world_size))


class OnCpu:
    def _setup_model(self, model):
        cpu = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)
        return super()._setup_model(cpu)


class RingstowFSDPOnCpu(OnCpu, RingstowFSDPStrategy):
    pass


class FSDPOnCpu(OnCpu, FSDPStrategy):
    pass


def strategy(kind, ranks, **options):
    """Return a strategy: ``mp`` or ``fsdp``, and ``stock-`` before it for Lightning's own."""
    if kind.endswith("mp"):
        one = RingstowModelParallelStrategy if kind == "mp" else ModelParallelStrategy
        return one(data_parallel_size=ranks, tensor_parallel_size=1, **options)
    if kind == "fsdp":
        return RingstowFSDPOnCpu(**options)
    return FSDPOnCpu(**{"state_dict_type": "sharded", **options})


# A run ends by its steps, and validates nothing.
SHORT = {"epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0, "max_steps": STEPS}


def run(kind, ranks, root, *callbacks, options=None, steps=STEPS, io=None, **checkpoints):
    """Return a Trainer of sharded runs that saves into a directory."""
    kept = ModelCheckpoint(dirpath=root, every_n_train_steps=EVERY, **checkpoints)
    how = {"devices": ranks, "strategy": strategy(kind, ranks, **(options or {}))}
    return trainer(root, kept, *callbacks, io=io, **{**SHORT, **how, "max_steps": steps})


def model(**options):
    lightning.seed_everything(1, verbose=False)
    return Sharded(**options)


def whole(one):
    """Return all that a run has learned, in whole tensors."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    return {
        "model": get_model_state_dict(one.strategy.model, options=options),
        "optimizer": get_optimizer_state_dict(
            one.strategy.model, one.strategy.optimizers, options=options
        ),
        "schedule": one.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": one.global_step,
    }


def fit(rank, ranks, kind, root, path=None, options=None, checkpoints=None, steps=STEPS):
    """Train, from a checkpoint if one is named; return the step it began with, and the end."""
    begin = Begin()
    one = run(kind, ranks, root, begin, options=options, steps=steps, **(checkpoints or {}))
    if path == "latest":
        newest = ringstow.latest(root)
        path = newest and newest.path
    one.fit(model(), ckpt_path=path)
    return one.global_step if begin.step is None else begin.step, whole(one)


__all__ = [
    "EVERY",
    "STEPS",
    "ModelCheckpoint",
    "Sharded",
    "fit",
    "model",
    "run",
    "strategy",
    "whole",
]
