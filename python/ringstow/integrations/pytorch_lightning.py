"""`ringstow.integrations.lightning` for the package ``pytorch_lightning``.

The two packages are the same code with base classes of their own: a Trainer takes the plugin of its
own package only.
"""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy

from ringstow.integrations._lightning._io import Saves, within
from ringstow.integrations._lightning._models import load_from_checkpoint
from ringstow.integrations._lightning._parallel import Live
from ringstow.integrations._lightning._sharded import Sharded

__all__ = [
    "RingstowCheckpointIO",
    "RingstowFSDPStrategy",
    "RingstowModelParallelStrategy",
    "load_from_checkpoint",
]


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
    _of_files = (
        FSDPStrategy.save_checkpoint.__code__,
        ModelParallelStrategy.save_checkpoint.__code__,
    )
    _of_threads = within(AsyncCheckpointIO.save_checkpoint)


class RingstowFSDPStrategy(Sharded, FSDPStrategy):
    """FSDP, with sharded checkpoints by ringstow: ``Trainer(strategy=RingstowFSDPStrategy())``.

    Args:
        background: return from a save while it runs. The next optimizer step waits until it has
            read all tensors. The next save, or the end of the run, raises its failure on all ranks.
        config: ringstow's settings; None means the defaults.
        allow_pickle: as in `RingstowCheckpointIO`.
        staging: as in `ringstow.save_async`, without ``"unguarded"``.
        kwargs: FSDPStrategy's own, except ``checkpoint_io`` and ``state_dict_type="full"``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"state_dict_type": "sharded", **kwargs})


class RingstowModelParallelStrategy(Live, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, with checkpoints by ringstow.

    Args:
        args: as in ModelParallelStrategy.
        kwargs: likewise, except ``save_distributed_checkpoint=False``; and ``background``,
            ``config``, ``allow_pickle`` and ``staging`` as in `RingstowFSDPStrategy`.
    """
