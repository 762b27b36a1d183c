"""What ringstow relies on in torchtitan, and which of its settings it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.tools import filesystem

from ringstow._errors import InvalidStateError, UnsupportedError

# What torchtitan's trainer calls of a manager, and what it has in its configuration. With any
# other, this manager could miss a call or ignore a setting.
_HOOKS = {"_close", "_load", "_maybe_wait_for_staging", "_save", "_wait_for_saving"}
_FIELDS = {
    "create_seed_checkpoint",
    "enable",
    "enable_first_step_checkpoint",
    "exclude_from_loading",
    "export_dtype",
    "folder",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "initial_load_model_only",
    "initial_load_path",
    "interval",
    "keep_latest_k",
    "last_save_in_hf",
    "last_save_model_only",
    "load_only",
    "load_step",
}


def check(base: Any) -> None:
    """Refuse a torchtitan whose trainer calls checkpoint managers in another way.

    Args:
        base: torchtitan's BaseCheckpointManager.

    Raises:
        UnsupportedError: names what differs.
    """
    fields = {field.name for field in dataclasses.fields(base.Config)}
    if differ := (base.__abstractmethods__ ^ _HOOKS) | (fields ^ _FIELDS):
        raise UnsupportedError(
            "this torchtitan has other checkpoint managers than ringstow knows. New or gone: "
            f"{', '.join(sorted(differ))}. docs/trainers/torchtitan.md has the versions that work"
        )


def refuse_unsupported(config: Any, folder: str, sd_adapter: Any) -> None:
    """Refuse settings that cannot be honoured.

    Args:
        config: the manager's.
        folder: where it saves.
        sd_adapter: torchtitan's, which converts a model to Hugging Face's format; or None.

    Raises:
        UnsupportedError: a path is a URL.
        InvalidStateError: Hugging Face's format for a model that torchtitan cannot convert.
    """
    for name, path in (("folder", folder), ("initial_load_path", config.initial_load_path)):
        if path and filesystem.is_remote(path):
            raise UnsupportedError(
                f"checkpoint.{name}={path}: ringstow reads and writes local paths. Mount it, or "
                "use torchtitan's own CheckpointManager"
            )
    for name in ("last_save_in_hf", "initial_load_in_hf"):
        if getattr(config, name) and sd_adapter is None:
            raise InvalidStateError(
                f"checkpoint.{name}=True, and this model has no state_dict_adapter: leave it out"
            )
