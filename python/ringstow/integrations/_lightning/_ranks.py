"""Loads of a sharded strategy's ranks. Needs a newer torch than the plugin."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ringstow._core._arguments import absolute
from ringstow._core._errors import InvalidStateError
from ringstow._state.tree._mismatch import Call
from ringstow.dcp import StorageReader
from ringstow.integrations._kit import _ranks
from ringstow.integrations._lightning._parts import META, MODEL, is_optimizers, optimizer_key


class Ranks(_ranks.Ranks):
    """All ranks of a strategy, in a group that training does not use."""

    def load(  # type: ignore[override]
        self,
        path: str,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        strict: bool,
        allow_pickle: bool,
    ) -> dict[str, Any]:
        """Load into a sharded model and its optimizers; return Lightning's own values.

        Raises:
            KeyMismatchError: the checkpoint has other keys, or tensors of other shapes.
            InvalidStateError: the checkpoint has no optimizer states, but optimizers need them.
            Exception: the error of the first rank that fails, on all ranks.
        """
        self.see(path)
        theirs = {name for name in self.names(path) if is_optimizers(name)}
        if optimizers and not theirs:
            raise InvalidStateError(
                f"{path} holds no optimizer's state, as save_weights_only=True saves it: it can be "
                "validated and tested, and not be trained further"
            )
        state = self.each(lambda: _wanted(model, optimizers, theirs))
        call = Call("strict_loading = False of the module")
        self.fill(state, path, call, strict=strict, allow_pickle=allow_pickle)
        self.each(lambda: _set(model, optimizers, state, strict=strict))
        (meta,) = state[META]
        return dict(meta)


def _wanted(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], saved: set[str]
) -> dict[str, Any]:
    """Return the state to load into.

    A parameter that had no gradient yet has no optimizer state here or in the checkpoint. torch
    makes a state for every parameter before it loads.
    """
    state: dict[str, Any] = {MODEL: get_model_state_dict(model), META: None}
    above = {name[:at] for name in saved for at, one in enumerate(name) if one == "."}
    for number, one in enumerate(optimizers):
        key = optimizer_key(number)
        wanted = get_optimizer_state_dict(model, one)
        of: dict[Any, Any] = cast("Any", wanted.get("state", {}))
        for name in [name for name in of if f"{key}.state.{name}" not in above]:
            del of[name]
        state[key] = wanted
    return state


def _set(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    strict: bool,
) -> None:
    set_model_state_dict(model, state[MODEL], options=StateDictOptions(strict=strict))
    for number, one in enumerate(optimizers):
        # Not strict, because a parameter may have no state. The load has compared the keys.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, one, state[optimizer_key(number)], options=options)


def kind_of(path: str) -> tuple[str, str]:
    """Return a checkpoint's path, and whether it is "ours" or "theirs".

    Checkpoints of stock strategies under ``use_by_default()`` are "by default".

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        InvalidStateError: it is ringstow's, but not of a sharded strategy.
    """
    has_theirs = os.path.isfile(os.path.join(path, "meta.pt"))
    if not os.path.isfile(os.path.join(path, "manifest.json")):
        if os.path.isdir(path) and not has_theirs:
            StorageReader(path).read_metadata()  # raises the checkpoint's error
        return path, "theirs"
    path = absolute(path)
    if META in _ranks.names_in(path, None):
        return path, "ours"
    if has_theirs:
        return path, "by default"
    raise InvalidStateError(
        f"{path} was not saved by one of ringstow's sharded strategies: make a file of it with "
        f"`ringstow convert {path} FILE.ckpt`, which they load"
    )
