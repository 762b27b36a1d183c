"""Packs a value and its tensors as one string of bytes, to store DCP's objects.

Pure. The layout is that of a safetensors file: the length of the header (eight bytes,
little-endian), a JSON header, and the elements. The header's ``__metadata__`` has the ``state``:
the tree, as in a manifest, of a dict with the value as its only item.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors import _numpy, _torch
from ringstow._state.tensors._memory import overlapping
from ringstow._state.tree import _encode
from ringstow._state.tree._refusals import Refusals

_LENGTH = 8
_METADATA = "__metadata__"
_BITS = re.compile(r"(?:U|I|F|BF|C)([0-9]+)(?:_|$)")


class Packed(NamedTuple):
    """The result of `split`."""

    tree: str
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    """Name, dtype, shape, bytes."""
    blocks: dict[str, bytearray]


def pack(key: str, value: object, refusals: Refusals) -> bytes:
    """Return a value as bytes; invalid if the value was refused.

    Args:
        key: the value's name, for messages.
        value: anything that a state dict may hold.
        refusals: collects values that can't be saved.
    """
    encoded = _encode.encode({key: value}, refusals=refusals, fast=False)
    if refusals:
        return b""
    header: dict[str, Any] = {_METADATA: {"format": "ringstow", "state": encoded.tree}}
    data: list[bytes] = []
    begin = 0
    for number in range(len(encoded.tensors)):
        name, (dtype, shape, *_, owner) = encoded.tensors[number]
        data.append(_bytes_of(owner, key))
        end = begin + len(data[-1])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *data])


def is_packed(data: bytes | memoryview) -> bool:
    """Return whether bytes begin like packed values, unlike any file of torch.save."""
    length = int.from_bytes(data[:_LENGTH], "little")
    return bytes(data[_LENGTH : _LENGTH + 2]) == b'{"' and _LENGTH + length <= len(data)


def split(data: bytes | memoryview) -> Packed:
    """Return the parts of packed bytes.

    Raises:
        ValueError: `pack` did not make them.
    """
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(bytes(data[_LENGTH:start]))
    metadata = header.pop(_METADATA, None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("state"), str):
        raise ValueError("the header has no state")
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    blocks: dict[str, bytearray] = {}
    entries = {name: _entry(entry) for name, entry in header.items()}
    if (
        twice := overlapping((begin, end, n) for n, (*_, begin, end) in entries.items())
    ) is not None:
        raise ValueError(f"the tensor {twice!r} has bytes of another")
    for name, (dtype, shape, begin, end) in entries.items():
        if not begin <= end <= len(data) - start or (end - begin) * 8 != _bits_of(dtype, shape):
            raise ValueError(f"the tensor {name!r} is not where the header says")
        tensors.append((name, dtype, shape, end - begin))
        blocks[name] = bytearray(data[start + begin : start + end])
    return Packed(metadata["state"], tensors, blocks)


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise ValueError("a tensor has no dtype")
    shape, offsets = _numbers(entry.get("shape")), _numbers(entry.get("data_offsets"))
    if len(offsets) != 2:
        raise ValueError("a tensor has no place")
    return entry["dtype"], tuple(shape), offsets[0], offsets[1]


def _numbers(found: Any) -> list[int]:
    if not isinstance(found, list) or any(type(n) is not int or n < 0 for n in found):
        raise ValueError("a tensor has no shape or no place")
    return found


def _bits_of(dtype: str, shape: tuple[int, ...]) -> int:
    found = _BITS.match(dtype)
    if dtype != "BOOL" and found is None:
        raise ValueError(f"the dtype {dtype!r} is unknown")
    return math.prod(shape) * (8 if found is None else int(found[1]))


def _bytes_of(owner: Any, key: str) -> bytes:
    """Return the elements of a tensor or array, in row-major order."""
    if _numpy.is_array(owner):
        return owner.tobytes()
    if not _torch.is_tensor(owner):
        raise UnsupportedError(
            f"{key} holds an array on a GPU: save it as a tensor, or on the host"
        )
    import ctypes  # slow import, rarely needed

    dense = owner.detach().cpu().contiguous()

    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
