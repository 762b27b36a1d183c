"""What one rank has of a state: its tensors, and the tree of all other values."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._errors import InvalidStateError
from ringstow.tensors import _cuda, _shards, _torch
from ringstow.tensors._memory import Memory, in_elements
from ringstow.tree import _encode
from ringstow.tree._walk import Path, describe, flat_name

if TYPE_CHECKING:
    import torch


class PerRank:
    """A value of which each rank has one of its own, such as the state of its random numbers.

    ::

        state = {"model": model, "rng": PerRank(torch.get_rng_state())}

    The checkpoint holds those of all ranks, by rank. A load puts this rank's into ``value``.

    Attributes:
        value: this rank's.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class State(NamedTuple):
    """What one rank saves."""

    tensors: _native.Tensors
    tree: str
    """JSON. A `PerRank` is ``{"$rank":"rng"}`` in it, which `own` has by that name."""
    own: dict[str, str]
    """The JSON of this rank's own values."""
    meshes: dict[str, tuple[int, ...]]
    """The ranks that have each sharded tensor, if they are not all of the default group."""


def encode(state: object, rank: int, *, allow_pickle: bool) -> State:
    """Encode what a rank has of a state; every value but the tensors' elements is copied now.

    Raises:
        InvalidStateError: values that can't be saved; names them all.
        UnsupportedError: likewise, tensors that can't be saved.
    """
    import torch

    own: dict[str, str] = {}
    meshes: dict[str, tuple[int, ...]] = {}
    world = torch.distributed.get_world_size()
    exchange, address_of = _torch.usual().exchange, _cuda.finder()

    def memory_of(local: torch.Tensor, path: Path) -> Memory:
        found = None if exchange is None else exchange.find(local, address_of)
        if found is None:
            return _torch.memory_of(local, describe(path))
        nbytes = local.numel() * local.element_size()
        return Memory(found[0], found[1], None, found[2], nbytes, local)

    def special(value: Any, path: Path, tensors: _native.Tensors) -> str | None:
        if _shards.is_sharded(value):
            name, ranks = _add_sharded(value, path, tensors, memory_of)
            if ranks is not None and len(ranks) < world:
                meshes[name] = ranks
            return f'{{"$tensor":{json.dumps(name, ensure_ascii=False)}}}'
        if type(value) is PerRank:
            return _add_own(value.value, path, rank, tensors, own, allow_pickle=allow_pickle)
        return None

    with torch.no_grad():
        encoded = _encode.encode(state, allow_pickle=allow_pickle, special=special)
    return State(encoded.tensors, encoded.tree, own, meshes)


def _add_sharded(
    value: Any,
    path: Path,
    tensors: _native.Tensors,
    memory_of: Callable[[torch.Tensor, Path], Memory],
) -> tuple[str, tuple[int, ...] | None]:
    """Add what this rank has of a sharded tensor; return its name and the ranks that have it."""
    shape, pieces, ranks = _shards.sharded(value, functools.partial(describe, path))
    name = tensors.reserve(flat_name(path))
    for local, offsets, replica in pieces:
        memory = memory_of(local, path)
        region = (in_elements(shape, memory.dtype), in_elements(offsets, memory.dtype))
        tensors.add_region(name, memory, region, replica)
    return name, ranks


def _add_own(
    value: Any,
    path: Path,
    rank: int,
    tensors: _native.Tensors,
    own: dict[str, str],
    *,
    allow_pickle: bool,
) -> str:
    """Add a value of this rank's alone; its tensors have the rank in their names."""
    key = describe(path)
    steps = [*map(str, path), str(rank)]
    if any(type(step) not in (str, int) or str(step).startswith("$") for step in path):
        raise InvalidStateError(f"{key}: a PerRank must be below keys of text without a $")
    nested = value
    for step in reversed(steps):
        nested = {step: nested}
    encoded = _encode.encode(nested, allow_pickle=allow_pickle)
    for number in range(len(encoded.tensors)):
        name, stored = encoded.tensors[number]
        memory = Memory(*stored)  # type: ignore[arg-type]  # nothing is lazy here
        if tensors.reserve(name) != name:
            raise InvalidStateError(f"{key}: the state has two tensors named {name!r}")
        tensors.add_region(name, memory, (memory.shape, (0,) * len(memory.shape)), (0, 1))
    tree = json.loads(encoded.tree)
    for step in steps:
        tree = tree[step]
    name = flat_name(path)
    if name in own:
        raise InvalidStateError(f"{key}: the state has two PerRanks named {name!r}; rename one")
    own[name] = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    return f'{{"$rank":{json.dumps(name, ensure_ascii=False)}}}'
