"""FSDP2: every rank saves and loads its shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ringstow._state.objects import _quantized_layers
from ringstow._state.tree._mismatch import Call
from ringstow.integrations._accelerate._states import ACCELERATOR, key, put_scaler
from ringstow.integrations._kit import _values

if TYPE_CHECKING:
    from ringstow.integrations._kit._ranks import Ranks

_FRESH = "fresh"
"""Parameter groups of optimizers that have not made a step yet."""


def check(meta: dict[str, Any], *, allow_pickle: bool) -> None:
    """Refuse values at the call that the save would refuse later.

    Raises:
        InvalidStateError: names each value, with what to save instead.
    """
    _values.check(ACCELERATOR, (meta,), allow_pickle=allow_pickle)


def collect(accelerator: Any, meta: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state that a rank saves. Rank 0 provides the values that are not sharded."""
    state: dict[str, Any] = {
        key("model", n): _weights(one) for n, one in enumerate(accelerator._models)
    }
    fresh: dict[str, Any] = {}
    for name, model, optimizer in _optimizers(accelerator):
        if optimizer.state:
            state[name] = get_optimizer_state_dict(model, optimizer)
        else:  # torch would make a step to create a state
            fresh[name] = optimizer.state_dict()["param_groups"]
    if meta is not None:
        # A tuple, as in earlier checkpoints: DCP wrote them, and would have flattened a dict.
        state[ACCELERATOR] = ({**meta, _FRESH: fresh},)
    return state


def load_into(accelerator: Any, path: str, ranks: Ranks, *, strict: bool) -> dict[str, Any]:
    """Load models and optimizers from any number of ranks; return the rest.

    Raises:
        KeyMismatchError: the checkpoint has other names, or tensors of other shapes.
        Exception: any other error of a rank, on all ranks.
    """
    rest: dict[str, Any] = {ACCELERATOR: None}
    ranks.fill(rest, path, Call())  # before anything changes
    meta = dict(rest[ACCELERATOR][0])
    fresh = meta[_FRESH]
    for name, _, optimizer in _optimizers(accelerator):
        if name in fresh:
            optimizer.load_state_dict({"state": {}, "param_groups": fresh[name]})
    # Torch makes a step to create a state to fill, and the scaler must be ready for that.
    put_scaler(accelerator, meta)
    models = {key("model", n): one for n, one in enumerate(accelerator._models)}
    state: dict[str, Any] = {name: _weights(one) for name, one in models.items()}
    optimizers = [one for one in _optimizers(accelerator) if one[0] not in fresh]
    for name, model, optimizer in optimizers:
        state[name] = get_optimizer_state_dict(model, optimizer)
    ranks.fill(state, path, Call("strict=False"), strict=strict)
    options = StateDictOptions(strict=strict)
    for name, model in models.items():
        if state[name] is not model:
            set_model_state_dict(model, state[name], options=options)
    for name, model, optimizer in optimizers:
        set_optimizer_state_dict(model, optimizer, state[name], options=options)
    return meta


def _weights(model: torch.nn.Module) -> Any:
    """Return a model's state, or the model itself, whose state a save and a load take."""
    # torch's call fails for the names of scales, and a dict's scales are not always the module's.
    return model if _quantized_layers.has_4bit(model) else get_model_state_dict(model)


def _optimizers(accelerator: Any) -> Iterator[tuple[str, torch.nn.Module, torch.optim.Optimizer]]:
    """Yield each optimizer's name, model and torch optimizer, paired as in Accelerate."""
    pairs = zip(accelerator._models, accelerator._optimizers, strict=False)
    for number, (model, optimizer) in enumerate(pairs):
        yield key("optimizer", number), model, optimizer.optimizer
