"""Lightning's checkpoints by ringstow: ``Trainer(plugins=[RingstowCheckpointIO()])``.

Needs the package ``lightning``; `ringstow.integrations.pytorch_lightning` is the same for
``pytorch_lightning``. docs/trainers/lightning.md says what it gains and what it does not support.
"""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from ringstow.integrations._lightning._io import Saves

__all__ = ["RingstowCheckpointIO"]


class RingstowCheckpointIO(Saves, CheckpointIO):
    """Saves a Trainer's checkpoints by ringstow: ``Trainer(plugins=[RingstowCheckpointIO()])``.

    Args:
        background: return from a save while it runs. The next optimizer step waits until it has
            copied all tensors. The next save, or the end of the run, raises its failure.
        config: ringstow's settings; None means the defaults.
        allow_pickle: pickle values that ringstow cannot save by itself, such as a function among
            the hyperparameters, and unpickle them, which can run any code.
        staging: as in `ringstow.save_async`.
    """

    _stock = TorchCheckpointIO
