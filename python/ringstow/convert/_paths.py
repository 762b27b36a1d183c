"""Paths: which of the kinds of checkpoints lies there, and whether one can be written there."""

from __future__ import annotations

import os
import re

from ringstow._errors import InvalidStateError

KINDS = {
    "ringstow": "a directory with manifest.json",
    "dcp": "a directory with .metadata, by torch.distributed.checkpoint",
    "torch": "a file, by torch.save",
    "hf": "a directory of *.safetensors files, by Hugging Face's programs",
}
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def kind_of(path: str) -> str:
    """Return the kind of checkpoint at a path.

    Raises:
        FileNotFoundError: nothing is there.
        InvalidStateError: none of the kinds; lists what was looked for.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "no such file or directory", path)
    if not os.path.isdir(path):
        return "torch"
    names = os.listdir(path)
    if "manifest.json" in names:  # beside which ringstow.dcp leaves a .metadata of no meaning
        return "ringstow"
    if ".metadata" in names:
        return "dcp"
    if any(name.endswith(".safetensors") for name in names):
        return "hf"
    listed = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    hint = ""
    if any(name.endswith(".metadata") for name in names):
        hint = (
            " It holds a .metadata file a rank, as torch.distributed.checkpoint writes with "
            "use_collectives=False: such checkpoints are not converted."
        )
    elif any(re.fullmatch(r"rank\d{5,}", name) for name in names):
        hint = (
            " It holds a checkpoint a rank, as ringstow.dcp writes with use_collectives=False: "
            "these are not converted; load them by dcp.load, and save with collectives."
        )
    elif any(name.endswith(".part") for name in names):
        hint = " It holds .part files: a save that was killed, or is under way."
    raise InvalidStateError(f"{path} is no checkpoint of a known kind. Looked for {listed}.{hint}")


def target_kind(source: str, path: str) -> str:
    """Return the kind to convert to where none was said: ringstow, from anything else.

    Raises:
        InvalidStateError: it can't be told.
    """
    if source != "ringstow":
        return "ringstow"
    if path.endswith(_TORCH_ENDINGS):
        return "torch"
    raise InvalidStateError(
        f"what to convert to can't be told from {path}: say it with --to (target=) dcp, torch or hf"
    )


def check_target(source: str, path: str, kind: str) -> None:
    """Refuse a target that is the source, or that holds something.

    A ringstow checkpoint may be there: it is replaced when the new one is committed. Model files
    are looked for by who writes them.

    Raises:
        InvalidStateError: the two are one.
        FileExistsError: something is there.
    """
    if os.path.realpath(source) == os.path.realpath(path):
        raise InvalidStateError(f"{path} is both source and target: give another target")
    if kind == "torch" and os.path.lexists(path):
        raise FileExistsError(17, "is there already; remove it, or give another target", path)
    if (
        kind == "dcp"
        and os.path.lexists(path)
        and not (os.path.isdir(path) and not os.listdir(path))
    ):
        raise FileExistsError(17, "is there already and not an empty directory", path)


def sync_dir(directory: str) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
