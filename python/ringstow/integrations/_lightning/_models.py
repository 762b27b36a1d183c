"""Makes models from checkpoints, as Lightning's ``Model.load_from_checkpoint`` does from files."""

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
    """Return a model, or a datamodule, loaded from a ringstow checkpoint or a file.

    ``Model.load_from_checkpoint`` loads files only, without the plugin. This makes such a file in
    memory: for a moment the checkpoint is in memory twice.

    Args:
        model: the LightningModule's or LightningDataModule's class.
        path: a checkpoint of the plugin or a sharded strategy. Lightning itself loads anything
            else.
        config: ringstow's settings; None means the defaults.
        allow_pickle: unpickle pickled values, which can run any code. ``weights_only=True`` forbids
            it.
        options: other arguments of ``Model.load_from_checkpoint``: ``map_location``, ``strict``,
            hyperparameters.

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
    # Safe: it holds only the values loaded above.
    made = make.load_from_checkpoint(file, weights_only=False, **options)
    return made
