"""Checkpoints of a PeftModel: the trained parameters, without the frozen base.

A checkpoint's state has each trained parameter under its name, and each adapter's tensors under
peft's names. ringstow stores a tensor with several names once. The trained parameters resume a run
bit by bit. The adapters are also written as files that peft opens: separate files, so that a
program that changes them does not touch ringstow's shards.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from ringstow._core._config import Config
from ringstow._core._errors import KeyMismatchError
from ringstow._reading._load import load
from ringstow.integrations._transformers import _weights

if TYPE_CHECKING:
    from peft import PeftModel

_FILE = "adapter_model.safetensors"


def is_peft_model(model: object) -> bool:
    """Return whether a model is a PeftModel with adapters that peft can save."""
    from transformers.utils import is_peft_available

    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def state_of(model: PeftModel) -> dict[str, Any]:
    """Return the trained parameters and, below `_weights.ADAPTERS`, all adapters."""
    return {**_trained(model), _weights.ADAPTERS: _adapters(model)}


def write_configs(model: PeftModel, path: str) -> None:
    """Write the files that peft's ``save_pretrained`` writes beside the weights."""
    model.create_or_update_model_card(path)
    base = model.get_base_model()
    for name, live in model.peft_config.items():
        config = copy.copy(live)
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = vars(base).get("name_or_path") or None
        kind = type(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        is_known = config.task_type is not None
        folder = _folder(path, name)
        os.makedirs(folder, exist_ok=True)
        config.save_pretrained(folder, auto_mapping_dict=None if is_known else mapping)


def write_files(path: str, config: Config | None) -> None:
    """Write the files that peft opens, from the adapters in a checkpoint.

    Raises:
        CorruptCheckpointError: bytes on disk are damaged.
        OSError: the system refused.
    """
    from safetensors.torch import save_file

    for name, tensors in load(path, prefix=_weights.ADAPTERS, config=config)[
        _weights.ADAPTERS
    ].items():
        # A safetensors file stores each tensor contiguously.
        apart = {key: tensor.clone() for key, tensor in tensors.items()}
        save_file(apart, os.path.join(_folder(path, name), _FILE), metadata={"format": "pt"})


def load_adapters(model: PeftModel, path: str, config: Config | None) -> None:
    """Load a checkpoint into a PeftModel that has the same adapters.

    Raises:
        KeyMismatchError: the checkpoint has other adapters, other tensors in them, or other trained
            parameters.
        CorruptCheckpointError: bytes on disk are damaged.
    """
    from peft import set_peft_model_state_dict

    saved = load(path, prefix=_weights.ADAPTERS, config=config)[_weights.ADAPTERS]
    mine, theirs = _names(_adapters(model)), _names(saved)
    if mine != theirs:
        missing, unexpected = sorted(mine - theirs), sorted(theirs - mine)
        raise KeyMismatchError(
            f"{path} has other adapters than the model; not in the checkpoint: "
            f"{missing[:20]}; only in the checkpoint: {unexpected[:20]}. Make the model with the "
            "configuration of the run that saved it",
            path=path,
            missing=missing,
            unexpected=unexpected,
        )
    for name, tensors in saved.items():
        set_peft_model_state_dict(model, tensors, adapter_name=name)
    _weights.load_weights(_trained(model), path, config)


def _trained(model: PeftModel) -> dict[str, Any]:
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


def _adapters(model: PeftModel) -> dict[str, dict[str, Any]]:
    from peft import get_peft_model_state_dict

    names = list(model.peft_config)
    return {name: get_peft_model_state_dict(model, adapter_name=name) for name in names}


def _names(adapters: dict[str, dict[str, Any]]) -> set[str]:
    return {f"{name}: {key}" for name, tensors in adapters.items() for key in tensors}


def _folder(path: str, name: str) -> str:
    """Return the directory in which peft saves an adapter."""
    return path if name == "default" else os.path.join(path, name)
