"""Gives what PyTorch's DCP left the keys and empty containers of the state that it is loaded into.

DCP takes mappings apart, writes their keys as text, and drops the empty ones: the state knows better.
Pure.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any

from ringstow.tree._walk import DICTS, Leaf, Path, flat_name, like

_NUMBER = re.compile(r"0|-?[1-9][0-9]*")
_MAPPINGS = (*DICTS, collections.Counter)
# What a Counter may count, and by what.
_PLAIN = {int, float, str}


def fitted(node: Any, target: Any) -> Any:
    """Return a part of a skeleton with the keys and containers that the target has in its place.

    A key of the target stands for the same one as text. What DCP would have dropped of the target
    is taken as it is.
    """
    if type(target) in _MAPPINGS and type(node) in DICTS:
        return _mapping(node, target)
    if type(target) is list and type(node) is list:
        return _list(node, target)
    return node


def _mapping(node: dict[Any, Any], target: dict[Any, Any]) -> Any:
    texts = {str(key): key for key in target if type(key) is not str}
    kinds = {*map(type, target)}
    items: dict[Any, Any] = {}
    for key, child in node.items():
        here = key if key in target or type(key) is not str else texts.get(key)
        if here is None and kinds == {int} and _NUMBER.fullmatch(key):
            here = int(key)  # a new one, beside numbers
        here = key if here is None else here
        items[here] = fitted(child, target[here]) if here in target else child
    for key, value in target.items():
        if key not in items and is_dropped(value):
            items[key] = value
    if type(target) is not collections.Counter:
        return like(target, items)
    kinds = {*map(type, items), *map(type, items.values())}
    return Leaf("$counter", items) if kinds <= _PLAIN else items


def _list(node: list[Any], target: list[Any]) -> list[Any]:
    items = [*node, *[None] * (len(target) - len(node))]
    for number, value in enumerate(target):
        if items[number] is None and is_dropped(value):
            items[number] = value
        elif number < len(node):
            items[number] = fitted(node[number], value)
        else:
            return items[:number]
    return items


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
        if all(type(key) is str and _NUMBER.fullmatch(key) for key in node):
            yield flat_name(path)
        for key, child in node.items():
            if type(child) is not Leaf:
                yield from numbers_as_text(child, (*path, key))
