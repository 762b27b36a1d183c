"""The tree of the checkpoint, made of those of the ranks. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Json = Any


def merged(trees: Sequence[str], own: Sequence[Mapping[str, str]]) -> str:
    """Return one tree.

    Args:
        trees: the first rank's, and those of ranks that have other keys, in JSON. Where several
            have a value, the first one's counts.
        own: for each rank its own values, in JSON, by the name that the trees have for them.
    """
    first, *others = trees
    if others:
        whole = json.loads(first)
        for other in others:
            _add(whole, json.loads(other))
        first = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    for name in {name: None for values in own for name in values}:
        here = json.dumps({"$rank": name}, ensure_ascii=False, separators=(",", ":"))
        ranks = ",".join(
            f'"{rank}":{values[name]}' for rank, values in enumerate(own) if name in values
        )
        first = first.replace(here, f"{{{ranks}}}")
    return first


def _add(node: Json, other: Json) -> None:
    """Add to a node what only another one has."""
    if isinstance(node, list) and isinstance(other, list):
        for here, there in zip(node, other, strict=False):
            _add(here, there)
    if not isinstance(node, dict) or not isinstance(other, dict):
        return
    if "$dict" in node and "$dict" in other:
        _add_pairs(node["$dict"], other["$dict"])
        return
    if any(key.startswith("$") for key in node.keys() | other.keys()):
        if node.keys() == other.keys() and not node.keys() & {"$tensor", "$ndarray"}:
            for key in node:
                _add(node[key], other[key])
        return
    for key, child in other.items():
        if key in node:
            _add(node[key], child)
        else:
            node[key] = child


def _add_pairs(pairs: list[list[Json]], others: list[list[Json]]) -> None:
    known = {json.dumps(key, sort_keys=True): child for key, child in pairs}
    for key, child in others:
        text = json.dumps(key, sort_keys=True)
        if text in known:
            _add(known[text], child)
        else:
            pairs.append([key, child])
