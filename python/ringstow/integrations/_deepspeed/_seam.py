"""What the integration relies on in DeepSpeed, and which engines it refuses."""

from __future__ import annotations

import inspect

import deepspeed
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from ringstow._errors import InvalidStateError, UnsupportedError

_DOCS = "docs/trainers/deepspeed.md has the versions that work"

# Methods with their arguments. `get_commit_info` is called before each optimizer step.
METHODS = {
    CheckpointEngine: {
        "create": ["info"],
        "save": ["state_dict", "path"],
        "makedirs": ["path", "exist_ok"],
        "load": ["path", "map_location"],
        "commit": ["info"],
        "is_data_parallel_writer": ["dp_rank"],
        "is_decoupled": [],
        "set_commit_info": ["info"],
        "get_commit_info": [],
        "cleanup": [],
        "preserves_storage_sharing": [],
    },
    DeepSpeedEngine: {
        "save_checkpoint": [
            "save_dir",
            "tag",
            "client_state",
            "save_latest",
            "exclude_frozen_parameters",
        ],
        "load_checkpoint": [
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
            "custom_load_fn",
        ],
        "load_universal_checkpoint": [],
        "super_offload": [],
        "use_node_local_storage": [],
        "zero_nvme_offload_optimizer": [],
        "zero_optimization_partition_weights": [],
    },
}


def check() -> None:
    """Refuse a DeepSpeed that saves in another way.

    Raises:
        UnsupportedError: names the method that differs.
    """
    for kind, methods in METHODS.items():
        for name, arguments in methods.items():
            method = getattr(kind, name, None)
            if method is None or list(inspect.signature(method).parameters)[1:] != arguments:
                raise UnsupportedError(
                    f"deepspeed {deepspeed.__version__} saves in another way: its "
                    f"{kind.__name__}.{name} is not {name}({', '.join(arguments)}). {_DOCS}"
                )
    if unknown := [
        name
        for name, method in vars(CheckpointEngine).items()
        if inspect.isfunction(method) and name[0] != "_" and name not in METHODS[CheckpointEngine]
    ]:
        raise UnsupportedError(
            f"deepspeed {deepspeed.__version__} saves in another way: its CheckpointEngine has "
            f"the methods {', '.join(unknown)}. {_DOCS}"
        )


def refuse_unsupported(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose state could not be saved.

    Raises:
        TypeError: it is no engine.
        InvalidStateError: it saves by ringstow already.
        UnsupportedError: the message has the remedy.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"use() takes the engine that deepspeed.initialize returns, not {type(engine).__name__}"
        )
    writer = engine.checkpoint_engine
    if "Ringstow" in type(writer).__name__:
        raise InvalidStateError("this engine saves by ringstow already: call use() once")
    refusals = {
        "use_node_local_storage: a checkpoint is one directory that all ranks share. Remove "
        '"use_node_local_storage" from "checkpoint"': engine.use_node_local_storage(),
        "an optimizer's state on NVMe: DeepSpeed copies it into the checkpoint by itself. Set the "
        'device of "offload_optimizer" to "cpu"': engine.zero_nvme_offload_optimizer(),
        "SuperOffload and ZenFlow: their optimizer steps run beside the training. Remove "
        '"super_offload" or "zenflow" from the configuration': (
            engine.super_offload() or getattr(engine, "zenflow", False)
        ),
        f'the {type(writer).__name__} of the configuration. Remove "writer" from "checkpoint", and '
        '"datastates_ckpt"': type(writer) is not TorchCheckpointEngine,
    }
    for what, is_there in refusals.items():
        if is_there:
            raise UnsupportedError(f"DeepSpeed's engine cannot save by ringstow with {what}")


check()
