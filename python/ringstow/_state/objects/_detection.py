"""Finds the values of a state that are objects with a state of their own. Pure."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ringstow._state.objects._per_rank import PerRank
from ringstow._state.tree import _custom_types
from ringstow._state.tree._refusals import Refused
from ringstow._state.tree._walk import Path

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = (list, tuple, collections.deque)
_PLAIN: set[type] = {int, float, bool, str, bytes, complex, type(None)}
"""Types of values that hold no other values; grows when a new type is seen."""
_MODES: dict[type, bool] = {}


def is_stateful(value: object) -> bool:
    """Return whether a value is an object with ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    known = _MODES.get(kind)
    if known is None:
        known = _MODES[kind] = all(
            callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")
        )
    return known


def is_a(value: object, module: str, *names: str) -> bool:
    """Return whether a value is of one of a module's types, without importing the module."""
    there = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(there, name, None), type))
    return isinstance(value, kinds)


def is_module(value: object) -> bool:
    """Return whether a value is a torch module."""
    return is_a(value, "torch.nn", "Module")


def is_optimizer(value: object) -> bool:
    """Return whether a value is a torch optimizer."""
    return is_a(value, "torch.optim", "Optimizer")


def found_in(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each object in a state, once, wherever it is."""
    yield from _found(value, path, set())


def _found(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    kind = type(value)
    if kind in _PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if is_stateful(value):
        yield path, value
    elif kind is PerRank:
        yield from _found(value.value, path, seen)
    else:
        for step, item in _items(value, kind) or ():
            yield from _found(item, (*path, step), seen)


def _items(value: Any, kind: type) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container; None if it cannot hold objects."""
    if kind in _DICTS:
        return None if _are_plain(value.values()) else value.items()
    if kind in _LISTS:
        return None if _are_plain(value) else enumerate(value)
    try:
        return _custom_types.parts(value)
    except Refused:
        return None


def _are_plain(values: Iterable[Any]) -> bool:
    """Return whether none of many values can hold an object, judged by their few types."""
    unknown = set(map(type, values)) - _PLAIN
    if unknown:
        tensors = {kind for kind in unknown if _is_tensor(kind)}
        _PLAIN.update(tensors)
        unknown -= tensors
    return not unknown


def _is_tensor(kind: type) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    return any(isinstance(base, type) and issubclass(kind, base) for base in (tensor, array))
