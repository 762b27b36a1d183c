"""`ringstow.integrations.lightning` for the package ``pytorch_lightning``.

The two packages are the same code with base classes of their own: a Trainer takes the plugin of its
own package only.
"""

from __future__ import annotations

from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO

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
