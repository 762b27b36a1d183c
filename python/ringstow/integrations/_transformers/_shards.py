"""Checkpoints of a model that FSDP2 has sharded: each rank writes its own shards.

The weights are below `_weights.SHARDS`, all else is below `_weights.TRAINER`. A checkpoint loads on
any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ringstow._config import Config
from ringstow._guard import Staging
from ringstow.dcp import LoadPlanner, StorageReader, _latest
from ringstow.dcp import _ranks as _dcp_ranks
from ringstow.dcp._together import from_first
from ringstow.integrations._transformers import _weights
from ringstow.tree._mismatch import Call

if TYPE_CHECKING:
    import torch

    from ringstow.dcp._handle import RanksHandle


class Shards:
    """Saves and loads by all ranks, which make it together.

    Args:
        config: ringstow's settings; None means the defaults.
        staging: as in `ringstow.save_async`, without ``"unguarded"``.

    Raises:
        InvalidStateError: ``staging`` is ``"unguarded"``.
    """

    def __init__(self, *, config: Config | None, staging: Staging) -> None:
        self._config = config
        # A save communicates in a thread of its own: not in a group that training uses.
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self._saves = _dcp_ranks.Ranks(config, staging, False, self._group)

    def start(self, state: dict[str, Any], part: str, step: int) -> RanksHandle:
        """Start to save a state of `state_of`, into a directory that rank 0 has prepared."""
        apart = [_weights.TRAINER] if _weights.TRAINER in state else []
        return self._saves.save_async(state, part, step, apart=apart)

    def load_weights(self, model: torch.nn.Module, path: str) -> None:
        """Load the weights of a checkpoint into a model.

        Raises:
            KeyMismatchError: the checkpoint has other weights than the model.
        """
        state = {_weights.SHARDS: get_model_state_dict(model)}
        self._load(state, path)
        set_model_state_dict(model, state[_weights.SHARDS])

    def load_trainer(self, model: torch.nn.Module, optimizer: Any, path: str) -> Any:
        """Load an optimizer's state.

        Returns:
            The scheduler's state; None if the checkpoint holds the weights alone.

        Raises:
            KeyMismatchError: the checkpoint is that of another optimizer.
        """
        if not any(_is_below(_weights.TRAINER, name) for name in self._names(path)):
            return None
        inner = _inner(optimizer)
        ours: dict[str, Any] = {
            "optimizer": get_optimizer_state_dict(model, inner),
            "scheduler": None,
        }
        self._load({_weights.TRAINER: ours}, path)
        set_optimizer_state_dict(model, inner, ours["optimizer"])
        (scheduler,) = ours["scheduler"]
        return scheduler

    def _load(self, state: dict[str, Any], path: str) -> None:
        """Load one of the parts, and leave the others."""
        _latest.agree_on(path, self._group)
        planner = LoadPlanner(flatten_sharded_tensors=False)
        planner.call = Call()
        planner.elsewhere = {
            name for name in self._names(path) if not any(_is_below(top, name) for top in state)
        }
        load(
            state,
            checkpoint_id=path,
            storage_reader=StorageReader(path, config=self._config),
            planner=planner,
            process_group=self._group,
        )

    def _names(self, path: str) -> set[str]:
        reader = StorageReader(path, config=self._config)
        return from_first(lambda: set(reader.read_metadata().state_dict_metadata), self._group)


def state_of(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return this rank's part of what `Shards.start` saves.

    Args:
        model: the model that FSDP has sharded.
        optimizer: the optimizer, which Accelerate has wrapped; None to save the weights alone.
        scheduler: the schedule of learning rates; used if there is an optimizer.
    """
    state: dict[str, Any] = {_weights.SHARDS: get_model_state_dict(model)}
    if optimizer is not None:
        ours: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, _inner(optimizer))}
        if dist.get_rank() == 0:
            # A tuple is one value to DCP, which takes dicts apart and makes all keys text.
            ours["scheduler"] = (scheduler.state_dict(),)
        state[_weights.TRAINER] = ours
    return state


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _is_below(top: str, name: str) -> bool:
    return name.startswith(f"{top}.")
