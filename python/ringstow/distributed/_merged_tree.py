"""Merges the trees of all ranks into the checkpoint's tree. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringstow._core._errors import InvalidStateError
from ringstow._state.objects._optimizers import GROUPS, PARAMS
from ringstow._state.objects._state_dicts import rank_key

Json = Any

_TENSORS = {"$tensor", "$ndarray"}
# Values of each rank: a `PerRank`, and an object whose state may differ between ranks.
_RANK, _EACH = "$rank", "$each"
# The items of these tags may be a list of pairs without a $dict around it.
_DICTS = {"$odict", "$defaultdict"}


def merged(trees: Sequence[str], own: Sequence[Mapping[str, str]]) -> str:
    """Return the merged tree.

    Args:
        trees: the trees of the first rank and of ranks with other keys, in JSON. If several have a
            value, the first one is used.
        own: each rank's own values, in JSON, by their names in the trees.

    Raises:
        InvalidStateError: ranks have different values at one key, and one would be lost.
    """
    first, *others = trees
    if others:
        whole = json.loads(first)
        for other in others:
            whole = _both(whole, json.loads(other), "")
        first = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    for name in {name: None for values in own for name in values}:
        known = {rank: values[name] for rank, values in enumerate(own) if name in values}
        for tag, key in (_RANK, str), (_EACH, rank_key):
            here = json.dumps({tag: name}, ensure_ascii=False, separators=(",", ":"))
            ranks = ",".join(f'"{key(rank)}":{value}' for rank, value in known.items())
            is_one = tag == _EACH and len(known) == len(own) > 1 and len({*known.values()}) == 1
            first = first.replace(here, known[0] if is_one else f"{{{ranks}}}")
    return first


def _both(node: Json, other: Json, name: str) -> Json:
    """Return a node extended by the keys that only another rank's node has."""
    if node == other:  # often the whole model; the comparison runs in C
        return node
    if isinstance(node, list) and isinstance(other, list):
        if name.rpartition(".")[2] == GROUPS and all(map(_has_names, (*node, *other))):
            return _joined_groups(node, other)
        if any(map(_has_tensors, other[len(node) :])):
            raise _clash(name)
        pairs = enumerate(zip(node, other, strict=False))
        return [*(_both(*pair, _below(name, at)) for at, pair in pairs), *node[len(other) :]]
    items, others = _items(node), _items(other)
    if items is not None and others is not None:
        return _joined(items, others, name)
    tags, other_tags = _tags(node), _tags(other)
    common = tags & other_tags
    if (tags & _TENSORS and other_tags & _TENSORS) or common & {_RANK, _EACH}:
        return node
    if common & _DICTS or (common and tags == other_tags):
        return {**other, **node} | {tag: _inner(tag, node, other, name) for tag in common}
    if others or tags & {_RANK, _EACH} or _has_tensors(other):
        raise _clash(name)
    return node


def _has_names(group: Json) -> bool:
    """Return whether an optimizer's group has the names of its parameters."""
    names = group.get(PARAMS) if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _joined_groups(groups: list[Json], others: list[Json]) -> list[Json]:
    """Return the groups of an optimizer whose pipeline stages have different parameters."""
    joined = [{**group} for group in groups]
    known = {name for group in groups for name in group[PARAMS]}
    for other in others:
        names = [name for name in other[PARAMS] if name not in known]
        alike = [one for one in joined if {**one, PARAMS: []} == {**other, PARAMS: []}]
        if alike:
            alike[0][PARAMS] = [*alike[0][PARAMS], *names]
        elif names:
            joined.append({**other, PARAMS: names})
    return joined


def _inner(tag: str, node: Json, other: Json, name: str) -> Json:
    """Return the merged content of a tag that both nodes have."""
    here, there = node[tag], other[tag]
    if tag in _DICTS:
        here, there = ({"$dict": one} if isinstance(one, list) else one for one in (here, there))
    both = _both(here, there, name)
    return both.get("$dict", both) if tag in _DICTS else both


def _joined(items: list[list[Json]], others: list[list[Json]], name: str) -> Json:
    """Return a dict with the items of both."""
    joined = {json.dumps(key, sort_keys=True): (key, child) for key, child in items}
    for key, child in others:
        text = json.dumps(key, sort_keys=True)
        known = joined.get(text)
        joined[text] = (key, child if known is None else _both(known[1], child, _below(name, key)))
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in joined.values()):
        return dict(joined.values())
    return {"$dict": [*map(list, joined.values())]}


def _items(node: Json) -> list[list[Json]] | None:
    """Return the items of a dict node; None for any other node."""
    if not isinstance(node, dict):
        return None
    if "$dict" in node:
        items: list[list[Json]] = node["$dict"]
        return items
    return None if _tags(node) else [[key, child] for key, child in node.items()]


def _tags(node: Json) -> set[str]:
    """Return the tags of a tagged node."""
    if not isinstance(node, dict) or not any(key.startswith("$") for key in node):
        return set()
    return {*node}


def _has_tensors(node: Json) -> bool:
    """Return whether a node refers to tensors, or to a rank's own values."""
    if isinstance(node, list):
        return any(map(_has_tensors, node))
    if not isinstance(node, dict):
        return False
    return bool(node.keys() & {*_TENSORS, _RANK, _EACH}) or any(map(_has_tensors, node.values()))


def _below(name: str, key: Json) -> str:
    return f"{name}.{key}" if name else str(key)


def _clash(name: str) -> InvalidStateError:
    return InvalidStateError(
        f"the ranks have different kinds of values, or lists of different lengths, at {name!r}, "
        "and one rank's would be lost: give each its own key, or make it a PerRank on all ranks"
    )
