"""The weights in a checkpoint: state dicts that hold them, and the index for ``from_pretrained``.

A checkpoint's state has the weights under their own names, and all else below `TRAINER`. What lies
there is saved apart, so the shards with the weights are those of a Hugging Face model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ringstow._config import Config
from ringstow._errors import KeyMismatchError
from ringstow._load import load, load_into

TRAINER = "__trainer__"
_MANIFEST = "manifest.json"
_INDEX = "model.safetensors.index.json"


def is_ours(path: str) -> bool:
    """Return whether a directory is a checkpoint that the mixin has saved."""
    return all(os.path.isfile(os.path.join(path, name)) for name in (_MANIFEST, _INDEX))


def load_weights(state_dict: dict[str, Any], path: str, config: Config | None) -> None:
    """Fill a model's tensors with the weights of a checkpoint.

    Raises:
        KeyMismatchError: the checkpoint has other weights than the model.
        CorruptCheckpointError: the bytes on disk are not those that were written.
    """
    report = load_into(state_dict, path, strict=False, config=config)
    ours = f"{TRAINER}."
    unexpected = [name for name in report.unexpected if f"{name}.".startswith(ours) is False]
    if report.missing or unexpected:
        raise KeyMismatchError(
            f"{path} has other weights than the model; not in the checkpoint: "
            f"{list(report.missing)[:20]}; only in the checkpoint: {unexpected[:20]}",
            path=path,
            missing=list(report.missing),
            unexpected=unexpected,
        )


def load_trainer(path: str, config: Config | None) -> dict[str, Any] | None:
    """Return what a checkpoint has beside the weights; None if it was saved without it.

    Raises:
        CorruptCheckpointError: the bytes on disk are not those that were written.
    """
    try:
        loaded: dict[str, Any] = load(path, prefix=TRAINER, config=config)[TRAINER]
    except KeyMismatchError:
        return None
    return loaded


def write_index(path: str) -> None:
    """Write the index that leads ``from_pretrained`` to the weights in a checkpoint's shards."""
    with open(os.path.join(path, _MANIFEST), encoding="utf-8") as stream:
        manifest = json.load(stream)
    tensors = [one for one in manifest["tensors"] if not one["name"].startswith(f"{TRAINER}.")]
    index = {
        "metadata": {"format": "ringstow"},
        "weight_map": {one["name"]: _file_of(one, manifest) for one in tensors},
    }
    with open(os.path.join(path, _INDEX), "w", encoding="utf-8") as stream:
        json.dump(index, stream, indent=1)


def _file_of(tensor: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    name: str = manifest["files"][tensor["chunks"][0]["file"]]["name"]
    return name
