"""The objects of one state; each object's state is taken once for a save or a load."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ringstow._state.objects._detection import found_in, is_module, is_optimizer
from ringstow._state.objects._modules import ModuleState
from ringstow._state.objects._optimizers import Modules, OptimizerState
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.tensors import _composites, _numpy, _shards, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tree import _cycles
from ringstow._state.tree._walk import Path, describe


class OtherState:
    """The state of an object that is neither a module nor an optimizer: a scheduler, a loader."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.state: Any = value.state_dict()

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank always has a state of its own, even if all are equal."""
        return bool(getattr(type(self._value), "is_per_rank", False))

    def load(self) -> None:
        """Load the filled state into the object."""
        self._value.load_state_dict(self.state)


_T = TypeVar("_T")
Part = ModuleState | OptimizerState | OtherState


class Parts:
    """The objects of a state, by the ``id`` of each."""

    def __init__(self, state: object) -> None:
        """Take the states of all objects; FSDP1's ranks communicate.

        Raises:
            Exception: the error of an object's ``state_dict``, with the object's key as a note.
        """
        with _cycles.naming_cycles(state):
            found = list(found_in(state))
        self._parts: dict[int, Part] = {}
        self._kept = [value for _, value in found]  # an id is free once its object is gone
        models = [
            (path, one, _taken(path, one, ModuleState)) for path, one in found if is_module(one)
        ]
        self.communicate = any(made.is_fsdp for *_, made in models)
        """Whether taking and loading these states needs communication, as with FSDP1."""
        self._parts.update((id(one), made) for _, one, made in models)
        modules = Modules(models)
        for path, one in found:
            if is_optimizer(one):
                take = functools.partial(OptimizerState, modules=modules)
                self._parts[id(one)] = _taken(path, one, take)
            elif not is_module(one):
                self._parts[id(one)] = _taken(path, one, OtherState)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, value: object) -> Part | None:
        """Return the part of an object; None for any other value."""
        return self._parts.get(id(value)) if self._parts else None

    def state_of(self, value: Any) -> Any:
        """Return the state of an object, and any other value itself."""
        part = self.of(value)
        return value if part is None else part.state

    def opened(self, value: Any) -> Any:
        """Return a state in which modules are replaced by their states."""
        part = self.of(value)
        if isinstance(part, ModuleState):
            return part.state
        if type(value) in (dict, collections.OrderedDict):
            return {key: self.opened(item) for key, item in value.items()}
        return value

    def stand_in(self, value: Any, path: Path) -> Any:
        """Return what one process saves for a value: an object's state, or a `PerRank`'s entry.

        A sharded tensor becomes plain if one process has all of it. Other values are unchanged.
        """
        part = self.of(value)
        if part is not None:
            per_rank = isinstance(part, OtherState) and part.is_per_rank
            return {rank_key(0): part.state} if per_rank else part.state
        if type(value) is PerRank:
            return {"0": value.value}
        if _shards.is_sharded(value):
            shape, pieces, _ = _shards.sharded(value, functools.partial(describe, path))
            is_whole = len(pieces) == 1 and tuple(pieces[0].local.shape) == shape
            if is_whole and pieces[0].replica == (0, 1):
                return pieces[0].local
        return value


def _taken(path: Path, value: Any, take: Callable[[Any], _T]) -> _T:
    try:
        return take(value)
    except Exception as error:
        error.add_note(f"raised by state_dict() of {describe(path)}")
        raise


def rank_key(rank: int) -> str:
    """Return the key of a rank's state of an object whose states differ between ranks."""
    return f"rank {rank}"


def of_rank(node: Any, rank: int) -> tuple[bool, Any]:
    """Return whether a checkpoint has a state per rank, and this rank's state, or None.

    Any other node is returned unchanged.
    """
    is_apart = (
        isinstance(node, dict)
        and bool(node)
        and all(
            type(key) is str and key.startswith("rank ") and key[5:].isdecimal() for key in node
        )
    )
    return (True, node.get(rank_key(rank))) if is_apart else (False, node)


def are_alike(values: list[Any]) -> bool:
    """Return whether values are equal, their tensors and arrays included."""
    first, *others = values
    return all(_is_like(first, other) for other in others)


def _is_like(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    parts = [_composites.as_parts(value) for value in (one, other)]
    if any(type(value) is TensorParts for value in parts):
        return all(type(value) is TensorParts for value in parts) and _is_like(*map(vars, parts))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_like(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_like, one, other))
    if _torch.is_tensor(one) or _numpy.is_array(one):
        same = one.dtype == other.dtype and one.shape == other.shape
        return bool(same and ((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other) or (one != one and other != other)
