"""Checkpoints of a model that FSDP2 has sharded: each rank writes its own shards.

The weights are below `_weights.SHARDS`, everything else is below `_weights.TRAINER`. A checkpoint
loads on any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ringstow._state.tree._mismatch import Call
from ringstow.integrations._transformers import _weights

if TYPE_CHECKING:
    import torch

    from ringstow.integrations._kit._ranks import Ranks


def load_weights(ranks: Ranks, model: torch.nn.Module, path: str) -> None:
    """Load the weights of a checkpoint into a model.

    Raises:
        KeyMismatchError: the checkpoint has other weights than the model.
    """
    state = {_weights.SHARDS: get_model_state_dict(model)}
    ranks.fill(state, path, Call())
    set_model_state_dict(model, state[_weights.SHARDS])


def load_trainer(ranks: Ranks, model: torch.nn.Module, optimizer: Any, path: str) -> Any:
    """Load an optimizer's state.

    Returns:
        The scheduler's state; None if the checkpoint holds the weights alone.

    Raises:
        KeyMismatchError: the checkpoint has another optimizer's state.
    """
    if not any(name.startswith(f"{_weights.TRAINER}.") for name in ranks.names(path)):
        return None
    inner = _inner(optimizer)
    ours: dict[str, Any] = {
        "optimizer": get_optimizer_state_dict(model, inner),
        "scheduler": None,
    }
    ranks.fill({_weights.TRAINER: ours}, path, Call())
    set_optimizer_state_dict(model, inner, ours["optimizer"])
    (scheduler,) = ours["scheduler"]
    return scheduler


def state_of(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return this rank's part of the state.

    Args:
        model: the model that FSDP has sharded.
        optimizer: the optimizer, which Accelerate has wrapped; None to save the weights alone.
        scheduler: the learning rate scheduler; saved only with an optimizer.
    """
    state: dict[str, Any] = {_weights.SHARDS: get_model_state_dict(model)}
    if optimizer is not None:
        ours: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, _inner(optimizer))}
        if dist.get_rank() == 0:
            # A tuple is one value for DCP, which would flatten a dict and turn its keys into text.
            ours["scheduler"] = (scheduler.state_dict(),)
        state[_weights.TRAINER] = ours
    return state


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
