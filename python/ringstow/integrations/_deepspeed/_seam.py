"""The parts of DeepSpeed that the integration uses, and the engines that it refuses."""

from __future__ import annotations

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from ringstow._core._errors import InvalidStateError
from ringstow.integrations._kit._framework_check import Seam
from ringstow.integrations._kit._refusals import refuse

SEAM = Seam(
    "deepspeed",
    "0.19",
    "large-scale",
    calls={
        CheckpointEngine: {
            "create": "info",
            "save": "state_dict path",
            "makedirs": "path exist_ok",
            "load": "path map_location",
            "commit": "info",
            "is_decoupled": "",
            "get_commit_info": "",  # called before each optimizer step
            "cleanup": "",
            "preserves_storage_sharing": "",
        },
        DeepSpeedEngine: {
            "save_checkpoint": "save_dir tag save_latest",
            "load_checkpoint": "load_dir tag load_optimizer_states",
            "load_universal_checkpoint": "",
            "super_offload": "",
            "use_node_local_storage": "",
            "zero_nvme_offload_optimizer": "",
            "zero_optimization_partition_weights": "",
        },
    },
)


def refuse_unsupported(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose state could not be saved.

    Raises:
        TypeError: the argument is not an engine.
        InvalidStateError: the engine already saves by ringstow.
        UnsupportedError: the message has the remedy.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"use() takes the engine that deepspeed.initialize returns, not {type(engine).__name__}"
        )
    writer = engine.checkpoint_engine
    if "Ringstow" in type(writer).__name__:
        raise InvalidStateError("this engine saves by ringstow already: call use() once")
    refuse(
        "RingstowCheckpointEngine",
        {
            "use_node_local_storage": (
                engine.use_node_local_storage(),
                "a checkpoint is one directory that all ranks share. Remove it from "
                '"checkpoint" in the configuration',
            ),
            "an optimizer's state on NVMe": (
                engine.zero_nvme_offload_optimizer(),
                "DeepSpeed copies it into the checkpoint by itself. Set the device of "
                '"offload_optimizer" to "cpu"',
            ),
            "SuperOffload and ZenFlow": (
                engine.super_offload() or getattr(engine, "zenflow", False),
                "their optimizer steps run beside the training. Remove "
                '"super_offload" or "zenflow" from the configuration',
            ),
            f"the {type(writer).__name__} of the configuration": (
                type(writer) is not TorchCheckpointEngine,
                'remove "writer" from "checkpoint", and "datastates_ckpt"',
            ),
        },
    )


SEAM.check()
