"""Directories in which a trainer has left a file for each part of its state.

Each part is opened only on demand, so that an unreadable part does not block the others.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import FormatError, MissingFilesError
from ringstow._foreign import _deepspeed
from ringstow._foreign._lazy_tensors import lazy_model
from ringstow._foreign._nested_states import Parts
from ringstow._foreign._pickles import reading
from ringstow._foreign._torch_file import Files

_log = logging.getLogger("ringstow")

# Files that hold an object of the program, not state: only pickle can load them.
OBJECTS = re.compile(r"training_args\.bin|sampler(_\d+)?\.bin")
_INDEX = ".index.json"
_TORCH = re.compile(r".*\.(pt|pth|bin|pkl)")
# The name of the directory of a model's or optimizer's shards, and the key of its state.
_SHARDED = (
    (re.compile(r"pytorch_model_fsdp(_\d+)"), "model"),
    (re.compile(r"optimizer(_\d+)"), "optimizer"),
)
_WEIGHTS = re.compile(r"(?:pytorch_)?model((?:_\d+)?)")


def of_folder(path: str, files: Files) -> tuple[Parts, list[str]]:
    """Return the parts of a Trainer's or an Accelerator's checkpoint, and the files left out.

    Raises:
        FormatError: two files have the same part's name.
        MissingFilesError: a file of a numbered set is missing.
    """
    parts: Parts = {}
    left_out: list[str] = []
    present = sorted(os.listdir(path))
    others = _native.superseded_weights(present)
    names = [name for name in present if name not in others]
    numbered = _check_sets(path, names)
    for name in names:
        if name in numbered:  # its index is the part
            continue
        if OBJECTS.fullmatch(name) and not files.allow_pickle:
            left_out.append(name)
            continue
        found = _part(path, name, files)
        if found is None:
            continue
        key, opens = found
        if key in parts:
            raise FormatError(f"{path} has two files for {key!r}: move {name} away", path=path)
        parts[key] = opens
    if _native.deepspeed_directory(path) is not None:
        parts["deepspeed"] = lambda: _all(_deepspeed.parts_of(path, files))
    return parts, left_out


def _part(path: str, name: str, files: Files) -> tuple[str, Callable[[], Any]] | None:
    at = os.path.join(path, name)
    if os.path.isdir(at):
        return _sharded(at, name, files)
    stem = os.path.splitext(name.removesuffix(_INDEX))[0]
    if name.endswith(_INDEX) or name.endswith(".safetensors") or _TORCH.fullmatch(name):
        return _key_of(stem), functools.partial(_tensors, path, name, files)
    if name == "trainer_state.json":
        return stem, functools.partial(_json, at)
    return None


def _key_of(stem: str) -> str:
    weights = _WEIGHTS.fullmatch(stem)
    return f"model{weights[1]}" if weights else stem


def _sharded(at: str, name: str, files: Files) -> tuple[str, Callable[[], Any]] | None:
    if not os.path.isfile(os.path.join(at, ".metadata")):
        return None
    for pattern, key in _SHARDED:
        if match := pattern.fullmatch(name):
            suffix = "" if match[1] == "_0" else match[1]
            return f"{key}{suffix}", functools.partial(_dcp, at, key, files)
    return name, functools.partial(_dcp, at, "", files)


def _dcp(at: str, key: str, files: Files) -> Any:
    from ringstow._foreign import _dcp

    state = _dcp.read(at, allow_pickle=files.allow_pickle)
    return state[key] if list(state) == [key] else state


def _tensors(path: str, name: str, files: Files) -> Any:
    """Return the contents of a file, or of all files that an index lists."""
    at = os.path.join(path, name)
    if ".safetensors" in name:
        return lazy_model(at, files.config)
    if not name.endswith(".json"):
        return files.read(at)
    state: dict[str, Any] = {}
    for file in _native.files_of_index(path, name):
        state.update(files.read(os.path.join(path, file)))
    return state


def weights(path: str, files: Files) -> Any:
    """Return the tensors of a model by torch.save, from the files that `from_pretrained` uses."""
    name = _native.weights_in(path, True)
    if name is None:
        _check_sets(path, sorted(os.listdir(path)))
        name = "pytorch_model.bin"
    return _tensors(path, name, files)


def _check_sets(path: str, names: list[str]) -> set[str]:
    """Return the numbered files; refuse sets of them that are incomplete, or have no index."""
    numbered: set[str] = set()
    for index, files, absent in _native.numbered_sets(names):
        missing = absent if index in names else [*absent, index]
        if missing:
            raise MissingFilesError(
                f"{path} lacks {len(missing)} of the files that {files[0]} belongs to: "
                f"{', '.join(missing[:20])}; take another copy of it, or an earlier checkpoint",
                path=path,
            )
        numbered.update(files)
    return numbered


def _json(path: str) -> Any:
    with reading(path, "it"), _files.reading(path) as file:
        return json.load(file)


def _all(parts: Parts) -> dict[str, Any]:
    return {key: opens() for key, opens in parts.items()}
