"""Modules that FSDP1 shards (`torch.distributed.fsdp.FullyShardedDataParallel`).

The names of its flat parameters depend on the number of ranks, so its public calls convert them to
sharded tensors and back. All ranks make these calls, which communicate.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringstow._state.objects._detection import is_a

if TYPE_CHECKING:
    import torch


def has_fsdp(module: torch.nn.Module) -> bool:
    """Return whether FSDP1 shards a part of a module."""
    return any(
        is_a(one, "torch.distributed.fsdp", "FullyShardedDataParallel") for one in module.modules()
    )


@contextlib.contextmanager
def _sharded(module: torch.nn.Module) -> Iterator[Any]:
    """Make state dicts hold this rank's shards; undone at the end."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it says that FSDP1 is deprecated
        with FullyShardedDataParallel.state_dict_type(
            module,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ):
            yield FullyShardedDataParallel


def model_state(module: torch.nn.Module) -> Any:
    """Return the state dict of a module, of sharded tensors."""
    with _sharded(module):
        return module.state_dict()


def load_model(module: torch.nn.Module, state: Any) -> None:
    """Load a state dict that `model_state` has made."""
    with _sharded(module):
        module.load_state_dict(state)


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the state dict of an optimizer, by the names of the module's parameters."""
    with _sharded(module) as fsdp:
        return fsdp.optim_state_dict(module, optimizer)


def load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load a state dict that has the names of the module's parameters."""
    with _sharded(module) as fsdp:
        flat = fsdp.optim_state_dict_to_load(module, optimizer, state)
    optimizer.load_state_dict(flat)
