"""The keys of a sharded checkpoint."""

from __future__ import annotations

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
