"""Models from checkpoints, as Lightning's ``Model.load_from_checkpoint`` makes them from files."""

from __future__ import annotations

import io
import os
from typing import Any, TypeVar

import torch

from ringstow._core._arguments import StrPath
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError
from ringstow._reading._load import load
from ringstow.integrations._lightning._parts import VERSION, is_sharded, unsharded

_M = TypeVar("_M")


def load_from_checkpoint(
    model: type[_M],
    path: StrPath,
    *,
    config: Config | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> _M:
    """Return a model, or a datamodule, with what a checkpoint of ringstow's or a file holds.

    ``Model.load_from_checkpoint`` loads files only, and asks no plugin. This makes such a file in
    memory: for a moment the checkpoint is there twice.

    Args:
        model: the LightningModule's or LightningDataModule's class.
        path: what the plugin or a sharded strategy saved. Anything else goes to Lightning as it is.
        config: ringstow's settings; None means the defaults.
        allow_pickle: unpickle what was pickled, which can run any code. ``weights_only=True``
            forbids it.
        options: those of ``Model.load_from_checkpoint``: ``map_location``, ``strict``,
            hyperparameters and the like.

    Raises:
        UnsupportedError: the checkpoint has pickled values, and they may not be unpickled.
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        InvalidStateError: no Trainer saved the checkpoint.
    """
    make: Any = model
    if not os.path.isdir(path):
        made: _M = make.load_from_checkpoint(path, **options)
        return made
    may_unpickle = allow_pickle and not options.pop("weights_only", False)
    state = load(path, config=config, allow_pickle=may_unpickle)
    if is_sharded(state):
        state = unsharded(state)
    if VERSION not in state:
        raise InvalidStateError(
            f"{path} was not saved by Lightning's Trainer: it has no {VERSION!r}. Make the model "
            "by yourself, and load its weights with ringstow.load"
        )
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    # Nothing but what was loaded above is in it.
    made = make.load_from_checkpoint(file, weights_only=False, **options)
    return made
