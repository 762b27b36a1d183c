"""Restores keys and empty containers of DCP checkpoints from the state to load into.

DCP flattens mappings, writes their keys as text, and drops empty ones. Pure.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

from ringstow._state.tree._walk import DICTS, Leaf, Path, flat_name, like

_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_MAPPINGS = (*DICTS, collections.Counter)
# Values of a Counter's counts; others are made later.
_PLAIN = {int, float, str, bool, type(None)}


def number_of(text: object) -> int | None:
    """Return the int that this text stands for; None if it is not the text of an int."""
    return int(text) if isinstance(text, str) and _NUMBER.fullmatch(text) else None


def fitted(node: Any, target: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return a part of a skeleton with the keys and containers of the target at the same place.

    ``state_of`` returns the state of an object of the target, and any other value itself.

    A key of the target replaces the equal text key. Containers that DCP would have dropped are
    taken from the target.
    """
    target = state_of(target)
    if type(target) in _MAPPINGS and type(node) in DICTS:
        return _mapping(node, target, state_of)
    if type(target) is list and type(node) is list:
        return _list(node, target, state_of)
    return node


def _mapping(node: dict[Any, Any], target: dict[Any, Any], state_of: Callable[[Any], Any]) -> Any:
    texts = {str(key): key for key in target if type(key) is not str}
    are_ints = {*map(type, target)} == {int}
    items: dict[Any, Any] = {}
    for text, child in node.items():
        key = text
        if text not in target and type(text) is str:
            number = number_of(text) if are_ints else None
            key = texts.get(text, text if number is None else number)
        items[key] = fitted(child, target[key], state_of) if key in target else child
    for key, value in target.items():
        if key not in items and is_dropped(value):
            items[key] = value
    if type(target) is not collections.Counter:
        return like(target, items)
    is_plain = {*map(type, items.values())} <= _PLAIN
    return Leaf("$counter", items) if is_plain else items


def _list(node: list[Any], target: list[Any], state_of: Callable[[Any], Any]) -> list[Any]:
    """Return the items, and the target's items that DCP would have dropped, also at the end."""
    items: list[Any] = []
    for number, value in enumerate(target):
        is_there = number < len(node)
        if is_dropped(value) and (not is_there or node[number] == {}):
            items.append(value)
        elif is_there:
            items.append(fitted(node[number], value, state_of))
        else:
            break
    return [*items, *node[len(target) :]]


def is_dropped(value: Any) -> bool:
    """Return whether DCP saves nothing of a value: an empty mapping, or containers of such."""
    if type(value) in _MAPPINGS:
        return all(map(is_dropped, value.values()))
    return type(value) is list and bool(value) and all(map(is_dropped, value))


def numbers_as_text(node: Any, path: Path = ()) -> Iterator[str]:
    """Yield the names of a skeleton's dicts whose keys are all numbers as text."""
    if type(node) is list:
        for number, child in enumerate(node):
            yield from numbers_as_text(child, (*path, number))
    elif type(node) in DICTS and node:
        if all(number_of(key) is not None for key in node):
            yield flat_name(path)
        for key, child in node.items():
            if type(child) is not Leaf:
                yield from numbers_as_text(child, (*path, key))
