"""Walks over nested states whose tensors may be lazy. Loads tensors and reads file sizes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from ringstow._core._errors import FormatError
from ringstow._state.tensors import _composites, _numpy, _torch
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _custom_types, _cycles
from ringstow._state.tree._custom_types import parts
from ringstow._state.tree._refusals import Refused
from ringstow._state.tree._walk import Box, Path, describe, rebuild

State = dict[Any, Any]
Make = Callable[[Any, Path], Any]
Parts = dict[str, Callable[[], Any]]
"""The functions that open each part of a state, by its key."""


_VALUES_MAX = 100_000


def check(path: str, state: object, at: Path = ()) -> None:
    """Refuse a state that cannot be copied: it contains itself, or its copy would be huge.

    A pickle has at least one byte for each value. But it can refer to one list so often that a copy
    with a list for each reference fills any memory.

    Args:
        path: the checkpoint, for messages and for its size.
        state: the checkpoint's state.
        at: the path of the state.

    Raises:
        FormatError: names the key.
    """
    try:
        is_endless = _cycles.count(state, at) > _VALUES_MAX + bytes_at(path)
    except _cycles.NestingError as error:
        raise FormatError(
            f"{path}: {error}: load it with torch.load, and save it again {error.remedy}", path=path
        ) from None
    if is_endless:
        raise FormatError(
            f"{path}: {describe(at)} refers to its own lists and dicts so often that a copy would "
            "have more values than the file has bytes: load it with torch.load, and save what you "
            "need of it",
            path=path,
        )


def check_size(path: str, nbytes: int, largest: str) -> None:
    """Refuse tensors that would need far more memory or file space than the checkpoint has.

    A tensor may have strides of 0, and many tensors may be views of the same elements.

    Args:
        path: the checkpoint.
        nbytes: the bytes of the tensors to create.
        largest: the name of the largest tensor.

    Raises:
        FormatError: the tensors are too large.
    """
    if nbytes > _ROOM_BYTES and nbytes > _ROOM_BYTES + _COPIES_MAX * (there := bytes_at(path)):
        raise FormatError(
            f"{path} has {there} bytes, and its tensors would take {nbytes}: they are views of the "
            f"same elements, {largest} for one. Load it with torch.load, which keeps views, and "
            "save what you need of it; or name a part of it by prefix= or keys=",
            path=path,
        )


_ROOM_BYTES = 64 << 20
_COPIES_MAX = 4


def bytes_at(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
        if os.path.isfile(os.path.join(folder, name))
    )


def is_stored(value: object) -> bool:
    """Return whether a value is a tensor or array, lazy or not."""
    return type(value) is LazyTensor or _torch.is_tensor(value) or _numpy.is_array(value)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, lazy or not, but not an array."""
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


def replaced(
    node: Any, make: Make, path: Path = (), is_one: Callable[[object], bool] = is_stored
) -> Any:
    """Return a copy of a state with ``make(value, path)`` in place of each tensor and array.

    ``is_one`` returns whether a value is replaced, if it is not for these alone.
    """

    def made(value: Any, at: Path) -> Any:
        if is_one(value):
            return make(value, at)
        if type(value) is Box:
            return _custom_types.with_fields(value, describe(at))
        try:
            return rebuild(_custom_types.fields_of(value), at, made, is_leaf)
        except Refused:  # its fields are not its whole state
            return value

    def is_leaf(value: object) -> bool:
        return is_one(value) or _custom_types.has_fields(value)

    return rebuild(node, path, made, is_leaf)


def resolved(state: State) -> State:
    """Return a copy of a state without conjugated or negated views, and composites as their parts.

    torch only marks such a view; the elements in memory differ. Each is copied when it is loaded.
    """
    known: dict[int, LazyTensor] = {}

    def make(value: Any, at: Path) -> Any:
        if not (_torch.is_tensor(value) and (value.is_conj() or value.is_neg())):
            return _composites.as_parts(value)
        if id(value) not in known:
            spec = spec_of(value.dtype, value.shape, describe(at))
            known[id(value)] = LazyTensor(*spec, functools.partial(_resolved, value))
        return known[id(value)]

    return replaced(state, make)  # type: ignore[no-any-return]


def _resolved(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg()


def spec_of(dtype: Any, size: Any, key: str) -> tuple[str, tuple[int, ...], int]:
    """Return a future torch tensor's safetensors dtype name, shape and bytes.

    Raises:
        UnsupportedError: the format does not have the dtype.
    """
    import torch

    shadow = torch.empty(size, dtype=dtype, device="meta")
    count = shadow.numel() * shadow.element_size()
    return _torch.code_of(shadow, key), _torch.shape_of(shadow, key), count
