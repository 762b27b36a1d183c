"""Converts DeepSpeed's states for ringstow, and ringstow's checkpoints to DeepSpeed's files."""

from __future__ import annotations

import errno
import os
import re
import shutil
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler

import ringstow
from ringstow._core import _files
from ringstow._core._errors import NoCheckpointError
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._deepspeed import _tags

# The only objects of DeepSpeed's own that ringstow cannot save by itself.
_SCALER = "__deepspeed_loss_scaler__"


def to_stock(
    checkpoint: str | os.PathLike[str], new: str | os.PathLike[str], *, allow_pickle: bool = False
) -> None:
    """Convert a tag's directory with ringstow's files to one with DeepSpeed's own files.

    DeepSpeed's stock engine, ``zero_to_fp32.py`` and ``ds_to_universal`` read it.

    Args:
        checkpoint: the directory of a tag.
        new: the new directory, which must not exist. It appears when it is complete.
        allow_pickle: unpickle values, which can run any code.

    Raises:
        NoCheckpointError: the directory holds no file of ringstow's.
        FileExistsError: the new directory exists.
    """
    source, final = os.path.abspath(checkpoint), os.path.abspath(new)
    names = [one.name for one in os.scandir(source) if one.is_dir()]
    if not any(name.endswith(_tags.STATES) for name in names):
        raise NoCheckpointError(f"{source} is no directory of a tag that ringstow has saved")
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
    part = _rename_when_complete.prepare(final, re.compile(re.escape(os.path.basename(final))))
    try:
        for name in os.listdir(source):
            if name in names and name.endswith(_tags.STATES):
                state = ringstow.load(os.path.join(source, name), allow_pickle=allow_pickle)
                with _files.new(os.path.join(part, name)) as stream:
                    torch.save(unpacked(state), stream)
            else:
                _rename_when_complete.link(os.path.join(source, name), os.path.join(part, name))
        _rename_when_complete.complete(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def packed(node: Any, known: dict[int, dict[Any, Any]] | None = None) -> Any:
    """Return a state in which loss scalers in dicts are dicts.

    Keeps a dict that contains itself: the save refuses it by name.
    """
    known = {} if known is None else known
    if isinstance(node, loss_scaler.LossScalerBase):
        return {_SCALER: type(node).__name__, **vars(node)}
    if type(node) is not dict:
        return node
    if id(node) not in known:
        made = known[id(node)] = {}
        made.update((key, packed(one, known)) for key, one in node.items())
    return known[id(node)]


def unpacked(node: Any) -> Any:
    """Return a state with the loss scalers that `packed` replaced."""
    if type(node) is not dict:
        return node
    if _SCALER not in node:
        return {key: unpacked(one) for key, one in node.items()}
    values = dict(node)
    kind = {one.__name__: one for one in (loss_scaler.LossScaler, loss_scaler.DynamicLossScaler)}
    scaler = object.__new__(kind[values.pop(_SCALER)])
    vars(scaler).update(values)
    return scaler
