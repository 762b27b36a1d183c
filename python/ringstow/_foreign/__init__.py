"""Checkpoints of other programs, which `load` and `open` also read.

Nothing here unpickles anything that could run code, unless the caller allows it. Tensors are read
on demand: those of safetensors files by the native reader, others from mapped files or one at a
time by torch's own readers.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core._errors import FormatError, MissingFilesError
from ringstow._foreign._checkpoint import Foreign
from ringstow._state.tensors._optional_packages import require

__all__ = ["Foreign", "opened", "state_of"]

if TYPE_CHECKING:
    from ringstow._foreign._torch_file import Files

# The name of a ShardedObject.
_OBJECT = re.compile(r".*/shard_[\d.]+_[\d.]+")
_FOLDERS = ("trainer", "accelerate")

_log = logging.getLogger("ringstow")


def opened(
    path: str,
    config: str,
    *,
    verify: bool = True,
    allow_pickle: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Foreign | None:
    """Open a checkpoint of another program.

    Args:
        path: its path.
        config: the configuration of native reads, as JSON.
        verify: compare checksums, where the program wrote any.
        allow_pickle: unpickle any value, which can run any code.
        progress: called with the bytes read, and their total.

    Returns:
        The checkpoint; None if the native side opens it or raises the error: ringstow's
        checkpoints, safetensors files and directories of them, and unknown kinds.

    Raises:
        NotCommittedError: its save has not ended.
        MissingFilesError: the checkpoint lacks files; names them.
        UnsupportedError: its format is not supported, or PyTorch is not installed.
        OSError: the system refused.
    """
    kind, is_by_torch = _native.kind_and_weights(path)
    if kind in (None, "safetensors") or (kind == "hf" and not is_by_torch):
        return None
    remedy = "pip install torch, or `ringstow convert` it where PyTorch is"
    require("torch", f"{path} is {_native.FOREIGN_KINDS[kind]}: it", remedy)
    from ringstow._foreign._torch_file import Files

    files = Files(allow_pickle=allow_pickle, verify=verify, config=config)
    parts, left_out = _parts(path, kind, files)
    found = Foreign(
        path,
        kind,
        parts,
        files,
        left_out=left_out,
        verified=verify and kind in ("torch", "deepspeed"),
        progress=progress,
    )
    if left_out:
        _log.warning(
            "%s: left out %s, which hold the program's objects and no state; allow_pickle=True "
            "reads them, and can run any code",
            path,
            " and ".join(left_out),
        )
    return found


def state_of(path: str, kind: str, files: Files) -> dict[str, Any]:
    """Return the state of a checkpoint in a directory, with tensors that load on demand.

    Raises:
        Exception: any error of `opened` and `Foreign.tree_of`.
    """
    parts, left_out = _parts(path, kind, files)
    if left_out:
        _log.warning("%s: left out %s, which only pickle can make", path, " and ".join(left_out))
    if "" in parts:
        return parts[""]()  # type: ignore[no-any-return]
    return {key: opens() for key, opens in parts.items()}


def _parts(path: str, kind: str, files: Any) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    from ringstow._foreign import _deepspeed, _trainer_directories

    if kind in _FOLDERS:
        return _trainer_directories.of_folder(path, files)
    if kind == "deepspeed":
        return _deepspeed.parts_of(path, files), []
    if kind == "torch":
        return {"": functools.partial(files.read, path)}, []
    if kind == "hf":
        return {"": functools.partial(_trainer_directories.weights, path, files)}, []
    return {"": functools.partial(_of_dcp, path, kind, files)}, []


def _of_dcp(path: str, kind: str, files: Any) -> dict[str, Any]:
    """Return the state of a DCP directory, and of the file that a trainer has put in it."""
    from ringstow._foreign import _dcp

    state = _dcp.read(path, allow_pickle=files.allow_pickle)
    beside = {"lightning": ("meta.pt", "lightning"), "megatron": ("common.pt", "common")}
    if kind not in beside:
        return state
    name, key = beside[kind]
    file = os.path.join(path, name)
    if not os.path.isfile(file):
        raise MissingFilesError(
            f"{path} lacks {name}, in which {kind.title()} keeps all that is not sharded; take "
            "another copy of it, or an earlier checkpoint",
            path=path,
        )
    if kind == "megatron":  # Megatron keeps each object in a list of its own
        for at, value in state.items():
            if _OBJECT.fullmatch(at) and type(value) is list and len(value) == 1:
                state[at] = value[0]
    if key in state:
        raise FormatError(f"{path}: the shards hold {key!r}, which is {name}'s key", path=path)
    held = files.read(file)
    # The form of ringstow's own strategies: a tuple for each rank that has saved one.
    state[key] = (held,) if kind == "lightning" else held
    return state
