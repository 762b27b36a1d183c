"""Recognizes the checkpoints of other programs by the names of their files. Reads no tensor."""

from __future__ import annotations

import contextlib
import json
import os
import re

from ringstow._core import _files
from ringstow._core._errors import NotCommittedError, UnsupportedError

KINDS = {
    "torch": "a file, by torch.save, such as Lightning's .ckpt",
    "dcp": "a directory with .metadata, by torch.distributed.checkpoint",
    "lightning": "a directory with .metadata and meta.pt, by Lightning's sharded strategies",
    "trainer": "a directory with trainer_state.json, by Transformers' Trainer",
    "accelerate": "a directory with random_states_0.pkl, by Accelerate's save_state",
    "deepspeed": "a directory with *_model_states.pt, or latest, by DeepSpeed",
    "megatron": "a directory with metadata.json, by Megatron-Core's torch_dist",
    "hf": "a directory of *.safetensors files, by Hugging Face's programs",
    "safetensors": "a *.safetensors file",
}
"""The kinds of other programs' checkpoints, and how each is recognized."""

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# A shard written by ringstow: it may hold only parts of tensors.
_SHARD = re.compile(r"rank\d{5,}-\d+(\.g\d+)?\.safetensors")
_TRAINER = re.compile(r"optimizer\.(pt|bin)|scheduler\.pt|rng_state(_\d+)?\.pth")
_ACCELERATE = re.compile(r"(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin")
_RANDOM = re.compile(r"random_states_\d+\.pkl")
_MODEL_STATES = "_model_states.pt"
_BIN = re.compile(r"(diffusion_)?pytorch_model(\.\w+)?(-\d+-of-\d+)?(\.\w+)?\.bin(\.index\.json)?")


def kind_of(path: str) -> str | None:
    """Return the kind of checkpoint of another program at a path; None if none is recognized.

    Raises:
        NotCommittedError: a save of the recognized program has not ended.
        UnsupportedError: the checkpoint is recognized, but its format is not supported.
        OSError: the system refused.
    """
    if not os.path.isdir(path):
        return _kind_of_file(path)
    names = set(os.listdir(path))
    if any(map(_SHARD.fullmatch, names)):  # ringstow's own checkpoint, without its manifest
        return None
    if "metadata.json" in names and (backend := _backend_of(path)):
        return _megatron(path, names, backend)
    if "trainer_state.json" in names:
        return "trainer"
    if deepspeed_tag(path) is not None:
        return "deepspeed"
    if ".metadata" in names:
        return "lightning" if "meta.pt" in names else "dcp"
    if any(map(_RANDOM.fullmatch, names)):
        return "accelerate"
    if any(map(_ACCELERATE.fullmatch, names)):
        raise _unfinished(path, "Accelerate's save_state", "random_states_0.pkl")
    if any(map(_TRAINER.fullmatch, names)):
        raise _unfinished(path, "Transformers' Trainer", "trainer_state.json")
    is_model = any(name.endswith(".safetensors") or _BIN.fullmatch(name) for name in names)
    return "hf" if is_model else None


def _kind_of_file(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    if _SHARD.fullmatch(os.path.basename(path)):
        raise UnsupportedError(
            f"{path} is one file of a ringstow checkpoint, which may hold only parts of tensors: "
            f"load {os.path.dirname(path) or '.'}"
        )
    if path.endswith(".safetensors"):
        return "safetensors"
    with _files.reading(path) as file:
        head = file.read(4)
    is_zip = head == b"PK\x03\x04" and not path.endswith(".npz")
    return "torch" if is_zip or path.endswith(TORCH_ENDINGS) else None


def deepspeed_tag(path: str) -> str | None:
    """Return the directory with DeepSpeed's files: the path, or the one that ``latest`` names.

    None if neither holds such files.
    """
    if any(name.endswith(_MODEL_STATES) for name in os.listdir(path)):
        return path
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with _files.reading(os.path.join(path, "latest")) as file:
            tag = file.read(1024).decode().strip()
        inside = os.path.join(path, tag)
        is_name = os.path.basename(tag) == tag and tag not in ("", ".", "..")
        if is_name and any(name.endswith(_MODEL_STATES) for name in os.listdir(inside)):
            return inside
    return None


def _backend_of(path: str) -> str | None:
    """Return the backend of a Megatron-Core checkpoint; None if the file is another program's."""
    try:
        with _files.reading(os.path.join(path, "metadata.json")) as file:
            found = json.load(file)
    except (ValueError, IsADirectoryError, _files.OtherKindError):
        return None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _megatron(path: str, names: set[str], backend: str) -> str:
    if backend not in ("torch_dist", "torch_dcp"):
        raise UnsupportedError(
            f"{path} is a checkpoint of Megatron-Core with the backend {backend!r}, and only "
            "torch_dist is read: load it with Megatron, and save it with --dist-ckpt-format "
            "torch_dist"
        )
    if ".metadata" not in names:
        raise _unfinished(path, "Megatron-Core", ".metadata")
    return "megatron"


def _unfinished(path: str, program: str, last: str) -> NotCommittedError:
    return NotCommittedError(
        f"{path} is a checkpoint of {program} and lacks {last}, which that writes last: the save "
        "was killed or is in progress. Resume from an earlier checkpoint; ringstow.load reads "
        "single files of it",
        path=path,
    )
