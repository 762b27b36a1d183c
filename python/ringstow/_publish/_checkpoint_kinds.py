"""Detects the kind of checkpoint at a path, and whether a new one may be written there."""

from __future__ import annotations

import contextlib
import os
import re

from ringstow import _native
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError
from ringstow._ranks._concurrent_saves import RANK_DIR

KINDS = {
    "ringstow": "a directory with manifest.json",
    **_native.FOREIGN_KINDS,
}
TARGETS = ("ringstow", "dcp", "torch", "hf")
"""The kinds that a conversion writes."""
# Files that make a directory a checkpoint: errors name these first.
_INDEX = "model.safetensors.index.json"
_MARKS = ("manifest.json", ".metadata", _INDEX, "model.safetensors")
_REPLACE = ", or replace it by --overwrite (overwrite=True)"
DCP_DATA = "__0_convert.distcp"
"""The file of tensors that a conversion to ``dcp`` writes. torch never uses this name: without
``.metadata`` it belongs to a killed conversion."""
_COMMITS = {
    "ringstow": ("manifest.json",),
    "dcp": (".metadata",),
    "torch": ("",),
    "hf": (_INDEX, "model.safetensors"),
}
"""The files in a target of each kind; the first one commits it."""
# With the unique text that ranks add to the names of uncommitted files.
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json|\.[0-9a-f]{16})?")


def kind_of(path: str) -> str:
    """Return the kind of checkpoint at a path.

    Raises:
        FileNotFoundError: the path does not exist.
        NotCommittedError: the save by torch.distributed.checkpoint has not ended.
        InvalidStateError: the path is none of the kinds; lists them.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "no such file or directory", path)
    if not os.path.isdir(path):
        return _native.foreign_kind(path) or "torch"
    names = os.listdir(path)
    if "manifest.json" in names:  # first: ringstow.dcp leaves a .metadata beside it
        return "ringstow"
    if kind := _native.foreign_kind(path):
        return kind
    if ".metadata" in names:  # from ringstow.dcp, but without the manifest
        return "dcp"
    if any(map(is_dcp, names)) and not any(name.endswith(".metadata") for name in names):
        _native.Checkpoint(path, Config().to_json())  # its error says what to do
    listed = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    hint = ""
    if any(name.endswith(".metadata") for name in names):
        hint = (
            " It holds a .metadata file per rank, as torch.distributed.checkpoint writes with "
            "use_collectives=False: such checkpoints can't be converted."
        )
    elif any(map(RANK_DIR.fullmatch, names)):
        hint = (
            " It holds a checkpoint per rank, as ringstow.dcp writes with use_collectives=False: "
            "these can't be converted; load them with dcp.load, and save with collectives."
        )
    elif any(name.endswith(".part") for name in names):
        hint = " It holds .part files: a save was killed, or is in progress."
    raise InvalidStateError(
        f"{path} is not a checkpoint of a known kind. Known kinds are {listed}.{hint}"
    )


def commit_of(path: str, kind: str) -> tuple[int, int, int] | None:
    """Return the identity of the file that commits a checkpoint of a kind; None if missing.

    Every conversion makes a new file.
    """
    for name in _COMMITS[kind]:
        with contextlib.suppress(OSError):
            found = os.stat(os.path.join(path, name) if name else path)
            return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def target_kind(source: str, path: str, *, changes: bool) -> str:
    """Return the kind to convert to if none was given.

    ``changes`` says that the conversion changes names or tensors, so that the kind may stay.

    The kind is torch if the path has the suffix of such a file, unless the source is one; otherwise
    ringstow.

    Raises:
        InvalidStateError: the kind can't be derived from the path.
    """
    if source != "torch" and path.endswith(_native.TORCH_ENDINGS):
        return "torch"
    if source != "ringstow":
        return "ringstow"
    kinds = "ringstow, dcp, torch or hf" if changes else "dcp, torch or hf"
    raise InvalidStateError(
        f"{path} does not say which kind to convert to: give --to (target=) {kinds}"
    )


def check_other(source: str, path: str) -> None:
    """Refuse a target that equals the source.

    Raises:
        InvalidStateError: the two paths are the same.
    """
    if os.path.realpath(source) == os.path.realpath(path):
        raise InvalidStateError(f"{path} is both source and target: give another target")


def check_target(path: str, kind: str, *, overwrite: bool) -> None:
    """Refuse a target that holds files which must not be replaced.

    Raises:
        FileExistsError: the target exists; names its contents.
    """
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) == (kind == "torch"):
        is_one = "is a directory" if kind == "torch" else "is there already and not a directory"
        raise taken(path, is_one)
    names = [] if kind == "torch" else sorted(os.listdir(path))
    foreign = next((name for name in names if not _may_stay_or_go(name, names, kind)), None)
    if overwrite:
        if foreign is not None:
            raise taken(path, f"holds {foreign}, which does not belong to a {kind} checkpoint")
        return
    unless = _REPLACE if foreign is None else ""
    if kind == "torch":
        raise taken(path, "is there already", unless)
    if kind == "dcp" and is_unfinished_dcp(names):  # this conversion removes them
        return
    if kind == "hf":
        if f"{_INDEX}.part" in names and _INDEX not in names:  # the next export removes its files
            names = [name for name in names if not is_model(name)]
        names = [name for name in names if is_model(name) or not _may_stay_or_go(name, names, kind)]
    elif kind == "ringstow" and "manifest.json" not in names:
        names = [name for name in names if not name.endswith(".part")]  # left by a killed save
    if names:
        what = next((name for name in names if name in _MARKS), names[0])
        raise taken(path, f"is there already, and holds {what}", unless)


def is_dcp(name: str) -> bool:
    """Return whether torch.distributed.checkpoint gives files this name."""
    return name in (".metadata", ".metadata.tmp") or name.endswith(".distcp")


def is_unfinished_dcp(names: list[str]) -> bool:
    """Return whether a directory holds only leftovers of a killed conversion to ``dcp``."""
    return DCP_DATA in names and {*names} <= {DCP_DATA, ".metadata.tmp"}


def is_model(name: str) -> bool:
    """Return whether Hugging Face's programs give the files of a model this name."""
    return _MODEL.fullmatch(name) is not None


def _may_stay_or_go(name: str, names: list[str], kind: str) -> bool:
    """Return whether a checkpoint of this kind replaces a file, or can leave it in place."""
    if kind == "dcp":
        return is_dcp(name)
    if kind == "hf":
        is_other = name == "manifest.json" or name.endswith(".safetensors") or is_dcp(name)
        return is_model(name) or not is_other
    # ringstow.dcp leaves a .metadata beside a manifest.
    return name != ".metadata" or "manifest.json" in names


def taken(path: str, what: str, unless: str = "") -> FileExistsError:
    """Return the error for a path whose contents must not be replaced."""
    return FileExistsError(17, f"{what}; remove it, or give another target{unless}", path)
