"""Directories in which a trainer has left a file for each part of its state.

Each part is opened when it is needed, and not before: a part that cannot be read does not hide the
others.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any

from ringstow._errors import FormatError, MissingFilesError
from ringstow.foreign import _deepspeed, _safetensors
from ringstow.foreign._kinds import deepspeed_tag
from ringstow.foreign._pickles import reading
from ringstow.foreign._states import Parts
from ringstow.foreign._torch_file import Files

# Files that hold an object of the program and no state: only pickle makes them.
OBJECTS = re.compile(r"training_args\.bin|sampler(_\d+)?\.bin")
_TORCH = re.compile(r".*\.(pt|pth|bin|pkl)")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_INDEX = ".index.json"
# What the directory of a model's or an optimizer's shards is called, and the key of its state.
_SHARDED = (
    (re.compile(r"pytorch_model_fsdp(_\d+)"), "model"),
    (re.compile(r"optimizer(_\d+)"), "optimizer"),
)
_WEIGHTS = re.compile(r"(?:pytorch_)?model((?:_\d+)?)")


def of_folder(path: str, files: Files) -> tuple[Parts, list[str]]:
    """Return the parts of a Trainer's or an Accelerator's checkpoint, and the files left out.

    Raises:
        FormatError: two files would be one part.
        MissingFilesError: a file of a numbered set is missing.
    """
    parts: Parts = {}
    left_out: list[str] = []
    names = sorted(os.listdir(path))
    _check_sets(path, names)
    for name in names:
        if OBJECTS.fullmatch(name) and not files.allow_pickle:
            left_out.append(name)
            continue
        found = _part(path, name, names, files)
        if found is None:
            continue
        key, opens = found
        if key in parts:
            raise FormatError(f"{path} has two files for {key!r}: move {name} away", path=path)
        parts[key] = opens
    if deepspeed_tag(path) is not None:
        parts["deepspeed"] = lambda: _all(_deepspeed.parts_of(path, files))
    return parts, left_out


def _part(
    path: str, name: str, names: list[str], files: Files
) -> tuple[str, Callable[[], Any]] | None:
    at = os.path.join(path, name)
    if os.path.isdir(at):
        return _sharded(at, name, files)
    if _NUMBERED.fullmatch(name):  # its index is the part
        return None
    stem, ending = os.path.splitext(name)
    if name.endswith(_INDEX):
        stem, ending = os.path.splitext(name.removesuffix(_INDEX))
        if ending == ".safetensors":
            return _key_of(stem), functools.partial(_safetensors.read_listed, path, name)
        return _key_of(stem), functools.partial(read_bins, path, name, files)
    if ending == ".safetensors":
        return _key_of(stem), functools.partial(_safetensors.read, at)
    if _TORCH.fullmatch(name):
        return _key_of(stem), functools.partial(files.read, at)
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
    from ringstow.foreign import _dcp

    state = _dcp.read(at, allow_pickle=files.allow_pickle)
    return state[key] if list(state) == [key] else state


def read_bins(path: str, index: str, files: Files) -> dict[str, Any]:
    """Return the tensors of the ``pytorch_model-*.bin`` files that an index lists."""
    state: dict[str, Any] = {}
    for file in _safetensors.listed(path, index):
        state.update(files.read(file))
    return state


def weights(path: str, files: Files) -> Any:
    """Return the tensors of a model's directory that has ``pytorch_model.bin`` files alone."""
    names = sorted(os.listdir(path))
    _check_sets(path, names)
    index = f"pytorch_model.bin{_INDEX}"
    if index in names:
        return read_bins(path, index, files)
    return files.read(os.path.join(path, "pytorch_model.bin"))


def _check_sets(path: str, names: list[str]) -> None:
    """Refuse numbered files without their index, or of which some are missing."""
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        stem, _, count, ending = match.groups()
        index = f"{stem}.{ending}{_INDEX}"
        wanted = {f"{stem}-{n:05}-of-{count}.{ending}" for n in range(1, int(count) + 1)} | {index}
        if missing := sorted(wanted - {*names}):
            raise MissingFilesError(
                f"{path} lacks {len(missing)} of the files that {name} belongs to: "
                f"{', '.join(missing[:20])}; take another copy of it, or an earlier checkpoint",
                path=path,
            )


def _json(path: str) -> Any:
    with reading(path, "it"), open(path, encoding="utf-8") as file:
        return json.load(file)


def _all(parts: Parts) -> dict[str, Any]:
    return {key: opens() for key, opens in parts.items()}
