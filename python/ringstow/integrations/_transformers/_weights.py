"""The weights in a checkpoint: state dicts that hold them, and the index for ``from_pretrained``.

A checkpoint's state has the weights under their own names, and everything else below `TRAINER`.
That part has files of its own, so the files with the weights are those of a Hugging Face model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from ringstow._core import _files
from ringstow._core._config import Config
from ringstow._core._errors import IncompleteCheckpointError, KeyMismatchError
from ringstow._reading._checkpoint import open as open_checkpoint
from ringstow._reading._load import fill, load
from ringstow._state.tree._mismatch import Call

Kind = Literal["a whole model", "adapters", "shards"]

TRAINER = "__trainer__"
ADAPTERS = "__adapters__"
"""The key of a PeftModel's adapters, each below its name, with peft's own tensor names."""
SHARDS = "__model__"
"""The key of a model's weights if the ranks have saved shards."""
_MANIFEST = "manifest.json"
_SHARD = r"rank\d{5}-\d+\.safetensors"
_INDEX = "model.safetensors.index.json"


def kind_of(path: str) -> Kind | None:
    """Return the kind of weights in the mixin's checkpoint; None if the mixin did not save it.

    Raises:
        IncompleteCheckpointError: the manifest is missing, but ringstow's shards exist.
        CorruptCheckpointError: the manifest is damaged.
    """
    if not os.path.isfile(os.path.join(path, _MANIFEST)):
        names = os.listdir(path) if os.path.isdir(path) else []
        if any(re.fullmatch(_SHARD, name) for name in names):
            raise IncompleteCheckpointError(
                f"{path} has ringstow's shards and no {_MANIFEST}, so it cannot be loaded: restore "
                "that file, or go back to an earlier checkpoint",
                path=path,
            )
        return None
    if os.path.isfile(os.path.join(path, _INDEX)):
        return "a whole model"
    with open_checkpoint(path) as opened:
        tops = {name.split(".", 1)[0] for name in opened}
    return "adapters" if ADAPTERS in tops else "shards" if SHARDS in tops else None


def load_whole(module: Any, path: str, config: Config | None) -> None:
    """Load all weights of a model.

    Raises:
        KeyMismatchError: the checkpoint has other weights than the model.
        CorruptCheckpointError: bytes on disk are damaged.
    """
    state = module.state_dict()
    tensors = {name: one for name, one in state.items() if hasattr(one, "untyped_storage")}
    load_weights(state, path, config)
    # The model's own tensors are filled. Other values of module states are new objects.
    if extra := {name: one for name, one in state.items() if name not in tensors}:
        module.load_state_dict(extra, strict=False)


def load_weights(state_dict: dict[str, Any], path: str, config: Config | None) -> None:
    """Fill a model's tensors with the weights of a checkpoint.

    Raises:
        KeyMismatchError: the checkpoint has other weights than the model.
        CorruptCheckpointError: bytes on disk are damaged.
    """
    report = fill(state_dict, path, Call(), strict=False, config=config)
    besides = (f"{TRAINER}.", f"{ADAPTERS}.")
    unexpected = [name for name in report.unexpected if not f"{name}.".startswith(besides)]
    if report.missing or unexpected:
        raise KeyMismatchError(
            f"{path} has other weights than the model; not in the checkpoint: "
            f"{list(report.missing)[:20]}; only in the checkpoint: {unexpected[:20]}",
            path=path,
            missing=list(report.missing),
            unexpected=unexpected,
        )


def load_trainer(path: str, config: Config | None) -> dict[str, Any] | None:
    """Return the checkpoint's values other than the weights; None if it has none.

    Raises:
        CorruptCheckpointError: bytes on disk are damaged.
    """
    try:
        loaded: dict[str, Any] = load(path, prefix=TRAINER, config=config)[TRAINER]
    except KeyMismatchError:
        return None
    return loaded


def write_index(path: str) -> None:
    """Write the index by which ``from_pretrained`` finds the weights in a checkpoint's shards."""
    with _files.reading(os.path.join(path, _MANIFEST)) as stream:
        manifest = json.load(stream)
    tensors = [one for one in manifest["tensors"] if not one["name"].startswith(f"{TRAINER}.")]
    index = {
        "metadata": {"format": "ringstow"},
        "weight_map": {one["name"]: _file_of(one, manifest) for one in tensors},
    }
    with _files.fresh(os.path.join(path, _INDEX)) as stream:
        stream.write(json.dumps(index, indent=1).encode())


def _file_of(tensor: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    name: str = manifest["files"][tensor["chunks"][0]["file"]]["name"]
    return name
