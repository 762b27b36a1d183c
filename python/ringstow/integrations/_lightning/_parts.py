"""The keys of a sharded checkpoint."""

from __future__ import annotations

from typing import Any

MODEL = "state_dict"
META = "lightning"
"""Lightning's own values, in a tuple of one."""
_OPTIMIZER = "optimizer_"


def optimizer_key(number: int) -> str:
    """Return the key of an optimizer's state."""
    return f"{_OPTIMIZER}{number}"


def is_optimizers(name: str) -> bool:
    """Return whether a flat name belongs to an optimizer's state."""
    return name.startswith(_OPTIMIZER)


def is_sharded(state: dict[str, Any]) -> bool:
    """Return whether a loaded state is a sharded strategy's, and not the plugin's."""
    return META in state and MODEL in state and "pytorch-lightning_version" not in state
