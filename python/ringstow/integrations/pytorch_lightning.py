"""`ringstow.integrations.lightning` for the package ``pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy

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
