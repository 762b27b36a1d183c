"""What readers and writers of torch's own formats use of torch that torch does not document.

A new torch may rename any of it. Without these names they can't read or write these formats: they
raise ImportError or AttributeError, which name them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem

from ringstow.tree import _cycles

# What torch.load(weights_only=True) says of a pickle stands after this, in a page of advice.
_UNPICKLER = "WeightsUnpickler error: "


def refusal_of(error: Exception) -> str:
    """Return what torch.load(weights_only=True) says of a pickle, in one line.

    The first line of all that it says if the text is laid out in another way.
    """
    text = str(error)
    lines = (text.partition(_UNPICKLER)[2] or text).strip().splitlines()
    return lines[0].partition(" Please use ")[0] if lines else "torch does not say what"


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return where torch's own format keeps an item: a file, an offset and a length in bytes."""
    return filesystem._StorageInfo(name, offset, length)


def flattened(state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state's values by flat name, and the path of each, as DCP's planner has them.

    Raises:
        InvalidStateError: a value contains itself; names its key.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    with _cycles.naming_cycles(state):
        return flatten_state_dict(state)


def set_element(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value at a path of a nested state, as DCP's planner does."""
    from torch.distributed.checkpoint import _traverse

    _traverse.set_element(state, path, value)


def read_items(name: str, stored: Any, chunks: list[Any]) -> list[Any]:
    """Return what to read of a stored tensor to fill these chunks."""
    from torch.distributed.checkpoint import planner_helpers

    return planner_helpers.create_read_items_for_chunk_list(name, stored, chunks)
