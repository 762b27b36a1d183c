"""Corrects a load planner's paths to the state dict's real keys, where DCP has them as text.

Torch's planner would add an item ``"5"`` beside the item 5 that it should replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem


class _Number(int):
    """An int as a key of a dict: torch treats exact ints as indices of lists."""


def set_paths(planner: object, items: Iterable[ReadItem]) -> None:
    """Correct the paths of the objects among these items, by which the planner replaces them."""
    if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict:
        return
    known: dict[int, dict[str, Any]] = {}
    for item in items:
        name = item.dest_index.fqn
        path = planner.mappings.get(name) if item.type == LoadItemType.BYTE_IO else None
        if path is not None:
            planner.mappings[name] = _path_in(planner.original_state_dict, path, known)


def _path_in(root: Any, path: tuple[Any, ...], known: dict[int, dict[str, Any]]) -> Any:
    """Return a path with the state dict's keys; ``known`` maps text to the keys of its mappings."""
    at, steps = root, []
    for step in path:
        if not isinstance(at, Mapping):
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif step in at:
            at = at[step]
        else:
            keys = known.get(id(at))
            if keys is None:
                keys = known[id(at)] = {str(key): key for key in at}
            step = keys.get(step, step)
            at = at.get(step)
            step = _Number(step) if type(step) is int else step
        steps.append(step)
    return tuple(steps)
