"""The keys of a sharded checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

MODEL = "state_dict"
META = "lightning"
"""Lightning's own values, in a tuple of one."""
VERSION = "pytorch-lightning_version"
"""A key in every checkpoint that Lightning's Trainer makes."""
_OPTIMIZER = "optimizer_"


def optimizer_key(number: int) -> str:
    """Return the key of an optimizer's state."""
    return f"{_OPTIMIZER}{number}"


def is_optimizers(name: str) -> bool:
    """Return whether a flat name belongs to an optimizer's state."""
    return name.startswith(_OPTIMIZER)


def is_sharded(state: dict[str, Any]) -> bool:
    """Return whether a sharded strategy saved a loaded state, not the plugin."""
    return META in state and MODEL in state and VERSION not in state


def unsharded(state: dict[str, Any]) -> dict[str, Any]:
    """Return the loaded state of a sharded checkpoint as a Trainer without shards saves it.

    An optimizer's state has parameter names where the Trainer's has numbers. Optimizers load both.
    """
    (meta,) = state[META]
    keys = itertools.takewhile(state.__contains__, map(optimizer_key, itertools.count()))
    optimizers = [state[key] for key in keys]
    whole = {**meta, MODEL: state[MODEL]}
    return {**whole, "optimizer_states": optimizers} if optimizers else whole
