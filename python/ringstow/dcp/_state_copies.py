"""Copies of state dicts: the same structure, every value frozen, every tensor replaced.

This copies the containers and the small values; the caller copies the tensors.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.tensors import _composites, _cuda, _torch
from ringstow._state.tree import _cycles
from ringstow._state.tree._refusals import type_name
from ringstow._state.tree._walk import DICTS, Path, describe, like, metadata_of
from ringstow.dcp import _private
from ringstow.dcp._private import ShardedTensor

_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.Size, torch.device, torch.layout, torch.memory_format),
)

# Returns the replacement for a tensor at a path in the copy.
Replace = Callable[[torch.Tensor, Path], torch.Tensor]


def rebuild(value: Any, replace: Replace, path: Path = ()) -> Any:
    """Return a frozen copy of a state with ``replace(tensor, path)`` in place of each tensor.

    It walks dicts and lists, as DCP does, and deep-copies any other value. For DCP a tuple is one
    value: dicts in it keep their types.

    Raises:
        InvalidStateError: a value can't be copied, or contains itself; names its key.
    """
    with _cycles.naming_cycles(value):
        return _rebuild(value, replace, path)


def _rebuild(value: Any, replace: Replace, path: Path) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return replace(value, path)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, Mapping):
        items = {key: _rebuild(item, replace, (*path, key)) for key, item in value.items()}
        return _like(value, items)
    if kind is list:
        return [_rebuild(item, replace, (*path, n)) for n, item in enumerate(value)]
    known = {}
    if kind is tuple:
        known = {id(tensor): replace(tensor, where) for where, tensor in _tensors(value, path)}
    try:
        return copy.deepcopy(value, known)
    except Exception as error:
        raise InvalidStateError(
            f"{describe(path)} is a {type_name(value)}, which can't be copied to be saved in the "
            f"background: {error}"
        ) from error


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the same type; in a dict unless it is Python's own type."""
    if type(value) not in (*DICTS, collections.Counter):
        return items
    made = like(value, items)
    metadata = metadata_of(value)
    if metadata is not None:
        made._metadata = copy.copy(metadata)
    return made


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield every tensor that `rebuild` replaces.

    Raises:
        InvalidStateError: a value contains itself; names its key.
    """
    with _cycles.naming_cycles(value):
        yield from _tensors(value, path)


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif type(value) in (list, tuple):
        for n, item in enumerate(value):
            yield from _tensors(item, (*path, n))


def parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors in this process's memory that a tensor consists of, if any.

    None for a kind of tensor that computes its elements itself.
    """
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        tensor = local_of(tensor)
    is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if is_usual and is_plain(tensor):
        return [tensor]
    if _composites.is_composite(tensor):
        return _allowed(tensor)
    return [tensor] if not is_usual and is_plain(tensor) else None


def _allowed(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the inner tensors of a composite; None if its type is not allowed."""
    try:
        return _composites.inner(tensor, "")
    except UnsupportedError:
        return None


def with_parts(tensor: torch.Tensor, copies: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same kind that consists of these copies of its `parts`."""
    if isinstance(tensor, ShardedTensor):
        return _private.sharded_tensor_of(copies, tensor)
    if isinstance(tensor, DTensor):
        return _private.dtensor_of(with_parts(local_of(tensor), copies), tensor)
    if _composites.is_composite(tensor):
        return _composites.with_inner(tensor, iter(copies), "")
    if not hasattr(tensor, "global_shape"):
        return copies[0]
    twin = copies[0].detach()  # a tensor of its own, over the same memory
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(twin, name, getattr(tensor, name))  # torch's CheckpointableTensor
    return twin


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, once its collectives have ended."""
    with torch.no_grad():
        return _private.waited_for(tensor.to_local())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in memory, at addresses given by its strides."""
    try:
        _torch.check_dense(tensor, "")
    except (InvalidStateError, UnsupportedError):
        return False
    return True


def clone(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Return a copy of a tensor that computes its elements itself, in host memory if possible.

    Raises:
        InvalidStateError: the tensor can't be copied; names its key.
    """
    try:
        with torch.no_grad():
            value = _private.waited_for(tensor)
            if value.device.type == "meta":
                return value
            value = value.detach()
            # No second copy on the device.
            return value.clone() if value.device.type == "cpu" else value.to("cpu")
    except Exception as error:
        raise InvalidStateError(
            f"{describe(path)} is a {type_name(tensor)}, which can't be copied: {error}"
        ) from error


def check(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor whose memory a sharding library has freed.

    Raises:
        InvalidStateError: names its key.
    """
    if not _cuda.is_addressable(tensor):
        return
    try:
        _torch.check_storage(tensor, "")
    except InvalidStateError:
        _torch.check_storage(tensor, describe(path))  # describing takes longer than the check
