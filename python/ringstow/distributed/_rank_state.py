"""One rank's part of a state: its tensors, and the tree of all other values."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._saving._guard import SMALL
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.objects._quantized_layers import Codes
from ringstow._state.objects._state_dicts import OtherState, Parts, rank_key
from ringstow._state.tensors import (
    _composite_shards,
    _composites,
    _cuda,
    _numpy,
    _shards,
    _torch,
)
from ringstow._state.tensors._memory import Memory, in_elements
from ringstow._state.tree import _cycles, _encode
from ringstow._state.tree._walk import Path, children, describe, flat_name

if TYPE_CHECKING:
    import torch

# Maximum size of an object's state that each rank saves separately if the states differ.
OWN_BYTES = 1 << 20


class State(NamedTuple):
    """One rank's encoded state."""

    tensors: _native.Tensors
    tree: str
    """The tree in JSON.

    A `PerRank` is ``{"$rank":"position"}``, and `own` has its value by that name. An object whose
    state may differ between ranks is ``{"$each":"loader"}``.
    """
    own: dict[str, str]
    """The JSON of this rank's own values."""
    meshes: dict[str, tuple[int, ...]]
    """The ranks that have each sharded tensor, if they are not all of the default group."""
    watched: list[tuple[str, Any, int]]
    """The large DTensors by name, each with its version at the call. An optimizer's step raises the
    DTensor's version, but not its local tensor's, which the native side watches."""

    def changed(self) -> list[str]:
        """Return the names of the large DTensors that were changed since the call."""
        return [name for name, tensor, version in self.watched if tensor._version != version]


def encode(state: object, parts: Parts, rank: int, *, allow_pickle: bool) -> State:
    """Encode this rank's part of a state; copies every value now, except the tensors' elements.

    ``parts`` are the objects of the state.

    Raises:
        InvalidStateError, UnsupportedError: values or tensors that can't be saved; names them all.
    """
    import torch

    own: dict[str, str] = {}
    meshes: dict[str, tuple[int, ...]] = {}
    watched: list[tuple[str, Any, int]] = []
    codes = Codes()
    world = torch.distributed.get_world_size()
    (kinds, exchange), address_of = _torch.usual(), _cuda.finder()

    def memory_of(local: torch.Tensor, path: Path) -> Memory:
        found = None if exchange is None else exchange.find(local, address_of)
        if found is None:
            return _torch.memory_of(local, describe(path))
        nbytes = local.numel() * local.element_size()
        return Memory(found[0], found[1], None, found[2], nbytes, local)

    def special(value: Any, path: Path, tensors: _native.Tensors) -> str | None:
        if _shards.is_sharded(value):
            key = functools.partial(describe, path)
            found = _shards.sharded(value, key)
            whole = None
            if _composite_shards.may_be_whole(found, kinds):
                whole = _composite_shards.whole_of(value, found, key)
            if whole is not None:
                _watch(value, watched, flat_name(path))
                return _of_composite(whole, path, tensors)
            name, nbytes = _add_pieces(path, (found.shape, found.pieces), tensors, memory_of)
            if codes.is_on:
                codes.note(name, found.shape, value.dtype, key=path[-1:])
            if nbytes > SMALL and type(value).__name__ == "DTensor":
                _watch(value, watched, name)
            if found.ranks is not None and len(found.ranks) < world:
                meshes[name] = found.ranks
            return _tagged("$tensor", name)
        if type(value) is PerRank:
            own_value, own_key, tag = value.value, str(rank), "$rank"
        else:
            part = parts.of(value)
            if not isinstance(part, OtherState):
                return None
            is_own = part.is_per_rank or (world > 1 and _is_small(part.state))
            if not is_own or not _can_be_own(path):
                return None
            own_value, own_key, tag = part.state, rank_key(rank), "$each"
        encoded = functools.partial(
            _encode.encode, allow_pickle=allow_pickle, stand_in=parts.stand_in
        )
        return _tagged(tag, _add_own(own_value, (*path, own_key), encoded, tensors, own))

    def _of_composite(whole: _composite_shards.Whole, path: Path, tensors: _native.Tensors) -> str:
        inner: dict[str, _encode.Json] = {}
        for name, (shape, pieces) in whole.inner.items():
            stored, _ = _add_pieces((*path, name), (shape, pieces), tensors, memory_of)
            if whole.ranks is not None and len(whole.ranks) < world:
                meshes[stored] = whole.ranks
            inner[name] = {"$tensor": stored}
        return _encode.composite_tree(whole.parts, inner, path)

    with torch.no_grad():
        encoded = _encode.encode(
            state, allow_pickle=allow_pickle, special=special, stand_in=parts.stand_in
        )
    # Not by the tensors' names: of two tensors of one memory only one is there.
    codes.check(lambda name: _text(f"{name}.absmax") in encoded.tree)
    return State(encoded.tensors, encoded.tree, own, meshes, watched)


def _watch(value: Any, watched: list[tuple[str, Any, int]], name: str) -> None:
    """Note a DTensor's version at the call, if it has one."""
    if not value.is_inference():
        watched.append((name, value, value._version))


def _tagged(tag: str, name: str) -> str:
    return f'{{"{tag}":{_text(name)}}}'


def _text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _can_be_own(path: Path) -> bool:
    """Return whether ranks may have values of their own below these keys."""
    return all(type(step) in (str, int) and not str(step).startswith("$") for step in path)


def _is_small(state: Any) -> bool:
    """Return whether each rank may save a state of its own: it has no large or sharded tensor."""
    total = 0
    for value in _cycles.reached(state, lambda one: [item for _, item in children(one) or ()]):
        if _shards.is_sharded(value):
            return False
        if _torch.is_tensor(value):
            total += sum(one.nbytes for one in _composites.inner(value, "") or [value])
        elif _numpy.is_array(value):
            total += value.nbytes
    return total <= OWN_BYTES


def _add_pieces(
    path: Path,
    of_rank: tuple[_shards.Shape, list[_shards.Piece]],
    tensors: _native.Tensors,
    memory_of: Callable[[torch.Tensor, Path], Memory],
) -> tuple[str, int]:
    """Add the regions that this rank has of a tensor; return its name, and the regions' bytes."""
    nbytes = 0
    shape, pieces = of_rank
    name = tensors.reserve(flat_name(path))
    for local, offsets, replica in pieces:
        memory = memory_of(local, path)
        region = (in_elements(shape, memory.dtype), in_elements(offsets, memory.dtype))
        tensors.add_region(name, memory, region, replica)
        nbytes += memory.nbytes
    return name, nbytes


def _add_own(
    value: Any,
    path: Path,
    encode: Callable[[object], _encode.Encoded],
    tensors: _native.Tensors,
    own: dict[str, str],
) -> str:
    """Add a value of only this rank, at a path that ends with the rank; return its name."""
    *above, _ = path
    key = describe(tuple(above))
    if not _can_be_own(tuple(above)):
        raise InvalidStateError(
            f"{key}: what each rank has of its own must be below keys of text without a $"
        )
    steps = [*map(str, path)]
    nested = value
    for step in reversed(steps):
        nested = {step: nested}
    encoded = encode(nested)
    for number in range(len(encoded.tensors)):
        name, stored = encoded.tensors[number]
        memory = Memory(*stored)  # type: ignore[arg-type]  # nothing is lazy here
        if tensors.reserve(name) != name:
            raise InvalidStateError(f"{key}: the state has two tensors named {name!r}")
        tensors.add_region(name, memory, (memory.shape, (0,) * len(memory.shape)), (0, 1))
    tree = json.loads(encoded.tree)
    for step in steps:
        tree = tree[step]
    name = flat_name(tuple(above))
    if name in own:
        raise InvalidStateError(
            f"{key}: the state has two values of each rank named {name!r}; rename one"
        )
    own[name] = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    return name
