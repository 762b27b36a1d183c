"""The parts of Megatron-Core that the integration uses."""

from __future__ import annotations

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils, base
from megatron.core.dist_checkpointing.strategies import torch as stock

from ringstow.integrations._kit._framework_check import Seam

SEAM = Seam(
    "megatron-core",
    "0.16",
    "large-scale",
    calls={
        serialization: {
            "save": "sharded_state_dict checkpoint_dir sharded_strategy async_sharded_save"
        },
        async_utils: {"AsyncRequest": "async_fn async_fn_args finalize_fns"},
        base: {"register_default_strategy": "action backend version strategy"},
        base.AsyncSaveShardedStrategy: {
            "save": "sharded_state_dict checkpoint_dir",
            "async_save": "sharded_state_dict checkpoint_dir",
        },
        base.LoadShardedStrategy: {
            "load": "sharded_state_dict checkpoint_dir",
            "load_tensors_metadata": "checkpoint_dir",
            "load_sharded_metadata": "checkpoint_dir",
        },
        stock: {
            "MCoreLoadPlanner": (
                "shapes_validation_sharded_tensors allow_shape_mismatch_sharded_tensors"
            ),
            "_replace_sharded_keys_with_state_dict_keys": "state_dict flat_mapping rename_mapping",
            "_replace_state_dict_keys_with_sharded_keys": (
                "sharded_state_dict keep_only_main_replica"
            ),
            "_restore_dict_types": "x keys_template",
            "_unwrap_pyt_sharded_tensor": "sh_ten",
            "mcore_to_pyt_state_dict": "state_dict is_loading",
            "sharded_tensor_to_torch_sharded_tensor": "sh_tens",
        },
        stock.TorchDistLoadShardedStrategy: {"load_tensors_metadata": "checkpoint_dir metadata"},
    },
    hooks={
        base.AsyncSaveShardedStrategy: frozenset({"async_save"}),
        base.LoadShardedStrategy: frozenset(
            [
                "check_backend_compatibility",
                "check_version_compatibility",
                "load",
                "load_tensors_metadata",
            ]
        ),
    },
)
SEAM.check()
