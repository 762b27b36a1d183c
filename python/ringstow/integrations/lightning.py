"""Lightning's checkpoints by ringstow: ``Trainer(plugins=[RingstowCheckpointIO()])``.

Needs the package ``lightning``; `ringstow.integrations.pytorch_lightning` is the same for
``pytorch_lightning``. See docs/trainers/lightning.md for benefits and limits.
"""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from ringstow.integrations._lightning._classes import classes
from ringstow.integrations._lightning._models import load_from_checkpoint

__all__ = [
    "RingstowCheckpointIO",
    "RingstowFSDPStrategy",
    "RingstowModelParallelStrategy",
    "RingstowSignals",
    "load_from_checkpoint",
]

(
    RingstowCheckpointIO,
    RingstowFSDPStrategy,
    RingstowModelParallelStrategy,
    RingstowSignals,
) = classes(
    __name__,
    CheckpointIO,
    TorchCheckpointIO,
    AsyncCheckpointIO,
    FSDPStrategy,
    ModelParallelStrategy,
    Callback,
)
