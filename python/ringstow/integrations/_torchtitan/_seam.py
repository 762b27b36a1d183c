"""The parts of torchtitan that ringstow uses, and the settings that it refuses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torchtitan.tools import filesystem

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow.integrations._kit._framework_check import Seam

_log = logging.getLogger("ringstow")

# The fields of torchtitan's manager configuration that this manager honours.
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


def seam(base: Any, stock: Any) -> Seam:
    """Return the manager methods that torchtitan's trainer calls, and those that this one uses."""
    hooks = {
        "_close": "",
        "_load": "step",
        "_maybe_wait_for_staging": "",
        "_save": "curr_step last_step",
        "_wait_for_saving": "",
    }
    return Seam(
        "torchtitan",
        "0.3",
        "large-scale",
        calls={base: hooks, stock: {"dcp_save": "state_dict checkpoint_id async_mode to_hf"}},
        hooks={base: frozenset(hooks)},
    )


def check(base: Any, stock: Any) -> None:
    """Refuse a torchtitan whose trainer calls checkpoint managers in another way.

    Args:
        base: torchtitan's BaseCheckpointManager.
        stock: torchtitan's CheckpointManager.

    Raises:
        UnsupportedError: names the differences.
    """
    fields = {field.name for field in dataclasses.fields(base.Config)}
    one = seam(base, stock)
    one.refuse(f"a manager's Config has no {name}" for name in sorted(_FIELDS - fields))
    one.check()
    if more := sorted(fields - _FIELDS):
        _log.warning("ringstow ignores these settings of checkpoints: %s", ", ".join(more))


def refuse_unsupported(config: Any, folder: str, sd_adapter: Any) -> None:
    """Refuse settings that cannot be honoured.

    Args:
        config: the manager's configuration.
        folder: the folder in which it saves.
        sd_adapter: torchtitan's converter to Hugging Face's format, or None.

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
