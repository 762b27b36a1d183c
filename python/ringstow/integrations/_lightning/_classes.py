"""The classes for one of Lightning's two packages, whose Trainers take only their own."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from ringstow.integrations._lightning._io import Saves
from ringstow.integrations._lightning._parallel import Live
from ringstow.integrations._lightning._sharded import Sharded
from ringstow.integrations._lightning._signals import Signals


def classes(
    module: str,
    io: Any,
    stock: Any,
    asynchronous: Any,
    fsdp: Any,
    parallel: Any,
    callback: Any,
) -> tuple[Any, Any, Any, Any]:
    """Return the plugin, the two strategies, and the callback.

    Args:
        module: the module from which users import them.
        io: the package's CheckpointIO.
        stock: its TorchCheckpointIO.
        asynchronous: its AsyncCheckpointIO.
        fsdp: its FSDPStrategy.
        parallel: its ModelParallelStrategy.
        callback: its Callback.
    """

    class RingstowCheckpointIO(Saves, io):
        """Saves a Trainer's checkpoints by ringstow: ``Trainer(plugins=[RingstowCheckpointIO()])``.

        Args:
            background: return from a save while it runs. The next optimizer step waits until it has
                copied all tensors. The next save, or the end of the run, raises its failure.
            config: ringstow's settings; None means the defaults.
            allow_pickle: pickle values that ringstow cannot save by itself, such as a function
                among the hyperparameters, and unpickle them, which can run any code.
            staging: how a background save keeps the values of the call; see `ringstow.save_async`.
        """

        _stock = stock
        _of_files = (fsdp.save_checkpoint.__code__, parallel.save_checkpoint.__code__)
        _of_threads = _within(asynchronous.save_checkpoint)

    class RingstowFSDPStrategy(Sharded, fsdp):
        """FSDP, with sharded checkpoints by ringstow: ``Trainer(strategy=RingstowFSDPStrategy())``.

        Args:
            background: return from a save while it runs. The next optimizer step waits until it has
                read all tensors. The next save, or the end of the run, raises its failure on all
                ranks.
            config: ringstow's settings; None means the defaults.
            allow_pickle: pickle values that ringstow cannot save by itself, and unpickle them,
                which can run any code.
            staging: how a background save keeps the values of the call: ``"guard"``, ``"snapshot"``
                or ``"wait"``; see `ringstow.save_async`.
            kwargs: FSDPStrategy's own, except ``checkpoint_io`` and ``state_dict_type="full"``.
        """

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{"state_dict_type": "sharded", **kwargs})

    class RingstowModelParallelStrategy(Live, parallel):
        """FSDP2 and tensor parallelism, with checkpoints by ringstow.

        Args:
            args: arguments of ModelParallelStrategy.
            kwargs: also its arguments, except ``save_distributed_checkpoint=False``; and
                ``background``, ``config``, ``allow_pickle`` and ``staging``: see
                `RingstowFSDPStrategy`.
        """

    class RingstowSignals(Signals, callback):
        """Has Lightning heed a signal after the same step on all ranks.

        ``Trainer(callbacks=[RingstowSignals(), ModelCheckpoint(save_on_exception=True)])``: after
        SIGTERM, also to one rank alone, all ranks raise Lightning's ``SIGTERMException`` at the end
        of a step. SLURMEnvironment's requeue saves between two steps, too. The signal is heard
        within about two seconds, or at the end of a step that takes longer than one.
        """

    made = (
        RingstowCheckpointIO,
        RingstowFSDPStrategy,
        RingstowModelParallelStrategy,
        RingstowSignals,
    )
    for one in made:
        one.__module__, one.__qualname__ = module, one.__name__  # strategies that spawn pickle them
    return made


def _within(function: Callable[..., Any]) -> tuple[CodeType, ...]:
    """Return the functions that a function defines."""
    return tuple(one for one in function.__code__.co_consts if isinstance(one, CodeType))
