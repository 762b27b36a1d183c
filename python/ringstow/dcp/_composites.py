"""Tensors that are made of others, under DCP: the inner tensors are entries of their own.

DCP plans such a tensor as one tensor. Ranks write its inner tensors in its place, and tell the
coordinator its tree. For a load it is one value, like an object. A DTensor of wrappers is saved and
loaded by this rank's regions of the inner tensors.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from ringstow._core._errors import UnsupportedError
from ringstow._reading import _composite_tensors
from ringstow._reading._shard_boxes import Boxed
from ringstow._state.tensors import _composite_shards, _composites, _shards, _torch
from ringstow._state.tensors._composite_shards import Whole
from ringstow._state.tensors._memory import ItemSpec, Memory, in_elements
from ringstow._state.tree import _build
from ringstow._state.tree._encode import composite_tree, encode
from ringstow._state.tree._refusals import Refusals
from ringstow._state.tree._walk import COMPOSITE, Box, Leaf
from ringstow.dcp import _private

_log = logging.getLogger("ringstow")


class Taken(NamedTuple):
    """A tensor as its parts."""

    tree: str
    """Its tree, as JSON."""
    specs: list[ItemSpec]
    """The inner tensors that this rank writes."""


def take(
    value: Any, item: WriteItem, planner: SavePlanner, refusals: Refusals, *, alone: bool
) -> Taken | None:
    """Return a composite as its parts; None if it is refused.

    Args:
        value: the tensor that the planner gives for the item; of a DTensor this rank's part.
        item: its item.
        planner: the planner that has the state.
        refusals: collects values that can't be saved.
        alone: whether each rank saves by itself.

    Raises:
        UnsupportedError: a DTensor of which it is not known how it is cut.
    """
    name, data = item.index.fqn, item.tensor_data
    if data is not None and data.chunk is not None and data.chunk.sizes != data.size:
        whole = None if alone else _whole(current(planner, name), name)
        if whole is None:
            raise UnsupportedError(
                f"{name} is a DTensor of a {type(value).__qualname__}: save it by "
                "ringstow.distributed.save, or .full_tensor() of it"
            )
        return _of_shards(whole, item)
    ahead = len(refusals)
    encoded = encode({name: value}, refusals=refusals, fast=False)
    if len(refusals) > ahead:
        return None
    specs: list[ItemSpec] = []
    for number in range(len(encoded.tensors)):
        inner, stored = encoded.tensors[number]
        specs.append((inner, Memory(*stored), None, False))  # type: ignore[arg-type]
    return Taken(json.dumps(json.loads(encoded.tree)[name], ensure_ascii=False), specs)


def current(planner: object, name: str) -> Any:
    """Return the value that a state has at a flat name; None if the planner keeps it elsewhere."""
    state = getattr(planner, "state_dict", None)
    return state.get(name) if isinstance(state, dict) else None


def _whole(value: Any, name: str) -> Whole | None:
    if not isinstance(value, DTensor):
        return None
    with torch.no_grad():
        sharded = _shards.sharded(value, lambda: name)
        return _composite_shards.whole_of(value, sharded, lambda: name)


def _of_shards(whole: Whole, item: WriteItem) -> Taken:
    """Return this rank's regions of the inner tensors of a DTensor."""
    name = item.index.fqn
    is_first = not any(item.index.offset or ())  # it writes what all ranks have
    specs: list[ItemSpec] = []
    tree: dict[str, Any] = {}
    for inner, (shape, pieces) in whole.inner.items():
        stored = f"{name}.{inner}"
        tree[inner] = {"$tensor": stored}
        for local, offsets, _ in pieces:
            memory = _torch.memory_of(local, stored)
            sizes = in_elements(shape, memory.dtype)
            if memory.shape != sizes:
                region = (sizes, in_elements(offsets, memory.dtype))
                specs.append((stored, memory, region, False))
            elif is_first:
                specs.append((stored, memory, None, False))
    return Taken(composite_tree(whole.parts, tree, (name,)), specs)


# Loads.


def is_composite(value: Any) -> bool:
    """Return whether a value of a state is a composite, or a DTensor of composites."""
    local = _shards.local_of(value) if isinstance(value, DTensor) else value
    return _composites.is_composite(local)


class Filling:
    """Notes what the tensors of a state get, and which don't fit."""

    def __init__(self) -> None:
        self.mismatched: list[str] = []
        self.sources: dict[tuple[str, int], tuple[Any, Any]] = {}


def check(planner: object, item: ReadItem, value: Any, filling: Filling) -> bool:
    """Return whether a loaded value is copied into the state's tensor; note if it doesn't fit.

    A tensor that can't be filled, such as a sparse one of other elements, is replaced in the state
    of an object, which takes the new one. In another state the module behind it would not see it.
    """
    name = item.dest_index.fqn
    here = current(planner, name)
    if not (_torch.is_tensor(here) and _torch.is_tensor(value)):
        return False
    problem = _composites.difference(here, value)
    if problem:
        filling.mismatched.append(f"{name} is {problem}")
    if problem or not _composites.is_composite(here):
        return False
    if _composites.can_fill(here):
        return True
    differs = _composites.misfit(here, value)
    if not differs:
        _composite_tensors.check_shared(filling, here, value, (name,))
        return True
    text = f"{name} is {differs[0]} here and {differs[1]} in the checkpoint"
    is_taken = _private.loaded_object(_first_key(planner, name))
    if is_taken is None:
        _log.warning("%s: the state gets a new tensor, which a module does not see", text)
    elif not is_taken:
        filling.mismatched.append(
            f'{text}: it can\'t be filled in place. Give dcp.load the module, {{"model": model}}, '
            "or None in its place, which gets the tensor"
        )
    return False


def _first_key(planner: object, name: str) -> Any:
    """Return the key of the state under which a flat name is."""
    paths = getattr(planner, "mappings", None)
    path = paths.get(name) if isinstance(paths, dict) else None
    return path[0] if path else name


def fill(planner: object, item: ReadItem, value: Any) -> Any:
    """Copy a value into the state's tensor, which `check` accepts; return that."""
    here = current(planner, item.dest_index.fqn)
    copy = _composites.fill if _composites.can_fill(here) else _composites.fill_layout
    copy(here, value)
    return here


def boxes(contents: _build.Contents, node: Any, value: Any, name: str) -> list[Boxed] | str | None:
    """Return this rank's regions of a stored composite.

    Returns:
        The regions; or why the composite does not fit; None if the value is no DTensor of
        composites.
    """
    whole = _whole(value, name)
    if whole is None:
        return None
    kind = whole.parts.type
    stored = dict(node.steps()) if isinstance(node, Box) and node.tag == COMPOSITE else {}
    there = node.name if stored else "value of another kind"
    if there != kind or stored.keys() != whole.inner.keys():
        return f"a DTensor of a {kind} here and a {there} in the checkpoint"
    _build.Survey(contents).note_context(node, (name,))
    context = _build.Builder(contents, {}).value(node.context, (name,))
    for key in _composites.differing(whole.parts.context or {}, context):
        return f"{key} {(whole.parts.context or {}).get(key)!r} here and {context.get(key)!r} there"
    found: list[Boxed] = []
    for inner, (shape, pieces) in whole.inner.items():
        leaf = stored[inner]
        if not isinstance(leaf, Leaf):
            return f"of {inner} that is a tensor here and not in the checkpoint"
        row = contents.stored(leaf, (name, inner))
        for local, offsets, _ in pieces:
            code = _torch.code_of(local, f"{name}.{inner}")
            if (code, in_elements(shape, code)) != (row.dtype, row.shape):
                return f"of {inner} {code} {list(shape)} here and {row.dtype} {list(row.shape)}"
            at = in_elements(offsets, code)
            found.append(Boxed(local.detach(), code, at, leaf, row, (name, inner)))
    return found
