"""Setups that `RingstowAccelerator` does not support, each with a remedy."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from ringstow._core._errors import InvalidStateError
from ringstow.integrations._kit._refusals import refuse

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_STOCK = "use Accelerator"


def refuse_unsupported(accelerator: Any) -> None:
    """Refuse an Accelerator whose state cannot be saved.

    Raises:
        UnsupportedError: names the unsupported setup, and what to use instead.
        InvalidStateError: the ranks have ended already.
    """
    if accelerator.num_processes > 1 and not dist.is_initialized():
        raise InvalidStateError(
            "the process group has ended, and RingstowAccelerator needs it: save before "
            "end_training()"
        )
    kind, is_fsdp2 = accelerator.distributed_type, accelerator.is_fsdp2
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    used = {
        "FSDP1": (
            kind == DistributedType.FSDP and not is_fsdp2,
            f"use FullyShardedDataParallelPlugin(fsdp_version=2), or {_STOCK}",
        ),
        "FULL_STATE_DICT": (
            is_fsdp2 and plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT,
            "use state_dict_type='SHARDED_STATE_DICT', which loads on any number of ranks; "
            "ringstow.load reads all of such a checkpoint in one process",
        ),
        f"distributed_type {getattr(kind, 'value', kind)}": (
            kind not in (*_WHOLE, DistributedType.FSDP),
            _STOCK,
        ),
        f"the device {accelerator.device.type}": (
            not is_fsdp2 and accelerator.device.type not in ("cpu", "cuda"),
            _STOCK,
        ),
        "tensor parallelism without FSDP2": (
            not is_fsdp2 and _has_shards(accelerator),
            "give the Accelerator a FullyShardedDataParallelPlugin(fsdp_version=2), too",
        ),
        "more optimizers than models under FSDP2": (
            is_fsdp2 and len(accelerator._optimizers) > len(accelerator._models),
            "put all parameters into the groups of one optimizer",
        ),
        "save_on_each_node=True": (
            accelerator.project_configuration.save_on_each_node,
            "save to a directory that all nodes share",
        ),
    }
    refuse("RingstowAccelerator", used)


@contextlib.contextmanager
def full_state_dict(accelerator: Any, path: str) -> Iterator[None]:
    """Let the stock Accelerator load its own checkpoint if each model is one whole file."""
    is_full = os.path.exists(os.path.join(path, "pytorch_model_fsdp.bin"))
    if not (accelerator.is_fsdp2 and is_full):
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    full = copy.copy(plugin)
    full.state_dict_config = full.optim_state_dict_config = None  # they depend on the type
    full.set_state_dict_type("FULL_STATE_DICT")
    accelerator.state.fsdp_plugin = full
    try:
        yield
    finally:
        accelerator.state.fsdp_plugin = plugin


def _has_shards(accelerator: Any) -> bool:
    return any(
        isinstance(parameter, DTensor)
        for model in accelerator._models
        for parameter in model.parameters()
    )
