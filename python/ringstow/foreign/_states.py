"""Walks over nested states whose tensors may be lazy. Pure, except for loading a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringstow.tensors import _numpy, _torch
from ringstow.tensors._memory import LazyTensor
from ringstow.tree import _program
from ringstow.tree._program import parts
from ringstow.tree._walk import Box, Path, describe, rebuild

State = dict[Any, Any]
Make = Callable[[Any, Path], Any]
Parts = dict[str, Callable[[], Any]]
"""What opens each part of a state, by its key."""


def is_stored(value: object) -> bool:
    """Tell whether a value is a tensor or array, lazy or not."""
    return type(value) is LazyTensor or _torch.is_tensor(value) or _numpy.is_array(value)


def is_tensor(value: object) -> bool:
    """Tell whether a value is a tensor, lazy or not, and not an array."""
    return _torch.is_tensor(value) or (type(value) is LazyTensor and not value.array)


def loaded(value: Any) -> Any:
    """Return the tensor or array itself."""
    return value.load() if type(value) is LazyTensor else value


def stored(node: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every tensor and array."""
    pairs = None if is_stored(node) else parts(node)
    if pairs is None:
        if is_stored(node):
            yield path, node
        return
    for key, child in pairs:
        yield from stored(child, (*path, key))


def total_bytes(state: object) -> int:
    """Return the bytes of all tensors and arrays; the same object counts once."""
    return sum(value.nbytes for value in {id(v): v for _, v in stored(state)}.values())


def replaced(node: Any, make: Make, path: Path = ()) -> Any:
    """Return a copy of a state with ``make(value, path)`` in place of each tensor and array."""

    def made(value: Any, at: Path) -> Any:
        if is_stored(value):
            return make(value, at)
        if type(value) is Box:
            return _program.with_fields(value, describe(at))
        return rebuild(_program.fields_of(value), at, made, is_leaf)

    def is_leaf(value: object) -> bool:
        return is_stored(value) or _program.has_fields(value)

    return rebuild(node, path, made, is_leaf)


def spec_of(dtype: Any, size: Any, key: str) -> tuple[str, tuple[int, ...], int]:
    """Return safetensors' dtype name, the shape and the bytes of a torch tensor, without making it.

    Raises:
        UnsupportedError: the format does not have the dtype.
    """
    import torch

    shadow = torch.empty(size, dtype=dtype, device="meta")
    count = shadow.numel() * shadow.element_size()
    return _torch.code_of(shadow, key), _torch.shape_of(shadow, key), count
