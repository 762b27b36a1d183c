"""What the integration relies on in Megatron-Core."""

from __future__ import annotations

import inspect
from importlib.metadata import version

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils, base
from megatron.core.dist_checkpointing.strategies import torch as stock

from ringstow._errors import UnsupportedError

# Functions and classes with their arguments.
CALLS = {
    (serialization, "save"): (
        "sharded_state_dict checkpoint_dir sharded_strategy common_strategy "
        "validate_access_integrity async_sharded_save preprocess_common_before_consistancy_check "
        "content_metadata"
    ),
    (async_utils, "AsyncRequest"): (
        "async_fn async_fn_args finalize_fns async_fn_kwargs preload_fn is_frozen call_idx"
    ),
    (base, "register_default_strategy"): "action backend version strategy",
    (base.AsyncSaveShardedStrategy, "save"): "self sharded_state_dict checkpoint_dir",
    (base.AsyncSaveShardedStrategy, "async_save"): "self sharded_state_dict checkpoint_dir",
    (base.LoadShardedStrategy, "load"): "self sharded_state_dict checkpoint_dir",
    (base.LoadShardedStrategy, "load_tensors_metadata"): "self checkpoint_dir",
    (base.LoadShardedStrategy, "load_sharded_metadata"): "self checkpoint_dir",
    (stock, "MCoreLoadPlanner"): (
        "args shapes_validation_sharded_tensors allow_shape_mismatch_sharded_tensors kwargs"
    ),
    (stock.TorchDistLoadShardedStrategy, "load_tensors_metadata"): "self checkpoint_dir metadata",
    (stock, "_replace_sharded_keys_with_state_dict_keys"): "state_dict flat_mapping rename_mapping",
    (stock, "_replace_state_dict_keys_with_sharded_keys"): (
        "sharded_state_dict keep_only_main_replica"
    ),
    (stock, "_restore_dict_types"): "x keys_template",
    (stock, "_unwrap_pyt_sharded_tensor"): "sh_ten",
    (stock, "mcore_to_pyt_state_dict"): (
        "state_dict is_loading init_device load_legacy_1d_flatten_tensors"
    ),
    (stock, "sharded_tensor_to_torch_sharded_tensor"): (
        "sh_tens rank load_legacy_1d_flatten_tensors"
    ),
}
_ABSTRACT = {
    base.AsyncSaveShardedStrategy: {"async_save"},
    base.LoadShardedStrategy: {
        "check_backend_compatibility",
        "check_version_compatibility",
        "load",
        "load_tensors_metadata",
    },
}


def check() -> None:
    """Refuse a Megatron-Core that saves in another way.

    Raises:
        UnsupportedError: names what differs.
    """
    differs = [
        f"{name}({', '.join(arguments.split())})"
        for (where, name), arguments in CALLS.items()
        if (one := getattr(where, name, None)) is None
        or list(inspect.signature(one).parameters) != arguments.split()
    ]
    differs += [
        f"the abstract methods of {kind.__name__}"
        for kind, names in _ABSTRACT.items()
        if kind.__abstractmethods__ != names
    ]
    if differs:
        raise UnsupportedError(
            f"megatron-core {version('megatron-core')} saves in another way, without "
            f"{', '.join(differs)}. docs/trainers/megatron.md has the versions that work"
        )


check()
