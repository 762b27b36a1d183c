"""Describes the memory of a tensor or array for the native side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Address = int | tuple[int, int, int]
"""Where bytes are: an address in host memory; or on a GPU, the device pointer, the device's index
and the handle of the stream on which they are ready (a save or load waits for the work that is on
that stream at the moment of the call)."""

Placed = tuple[tuple[int, ...] | None, int, object]
"""A tensor's elements in host memory: strides in bytes (None: dense), address, and the owner of the
memory."""

NamedBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, and the offsets and sizes of a box in it."""

InFiles = tuple[list[str], list[NamedBox]]
"""What is read of a checkpoint's files: whole tensors by name, and boxes of others."""


def place_at(address: Address) -> tuple[int, int | None]:
    """Return the pointer and the device (None: the host) of an address, ignoring the stream."""
    return address[:2] if isinstance(address, tuple) else (address, None)


def moved(address: Address, nbytes: int) -> Address:
    """Return the address increased by a number of bytes."""
    if isinstance(address, tuple):
        return (address[0] + nbytes, *address[1:])
    return address + nbytes


def dense_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a dense array in row-major order."""
    strides = []
    for size in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= size
    return tuple(reversed(strides))


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], their_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return offsets and sizes of the intersection of two boxes; None if it is empty."""
    first = tuple(map(max, offsets, others))
    ends = zip(offsets, sizes, others, their_sizes, first, strict=True)
    lengths = tuple(min(a + n, b + m) - at for a, n, b, m, at in ends)
    return (first, lengths) if all(n > 0 for n in lengths) else None


def in_elements(lengths: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Return torch's sizes or offsets in elements; torch counts 4-bit elements in pairs."""
    return (*lengths[:-1], lengths[-1] * 2) if dtype == "F4" and lengths else lengths


def share_elements(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Return whether two elements of a strided tensor may be the same memory."""
    reach = 0
    for step, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += (n - 1) * step
    return False


class Memory(NamedTuple):
    """The bytes of one tensor. A reference to ``owner`` keeps them alive."""

    dtype: str
    """safetensors' name of the element type: ``"F32"``."""
    shape: tuple[int, ...]
    """In elements of that type."""
    strides: tuple[int, ...] | None
    """In bytes; None if the elements are dense in row-major order."""
    address: Address
    nbytes: int
    """Bytes of the dense data, not of the memory range of a strided view."""
    owner: object

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for two tensors with the same elements in the same memory."""
        return (*place_at(self.address), *self[:3])


def overlapping(spans: Iterable[tuple[int, int, str]]) -> str | None:
    """Return the name of a tensor that overlaps another in a file; None if there is none.

    Args:
        spans: begin, end and name of each tensor.
    """
    ends = 0
    for begin, end, name in sorted(spans):
        if begin < min(end, ends):
            return name
        ends = max(ends, end)
    return None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LazyTensor:
    """A tensor or array of a state dict that is loaded only when the save writes it.

    One object in two places is one tensor. A thread of the save calls ``load``; its error fails the
    save.
    """

    dtype: str
    """safetensors' name of the element type: ``"F32"``."""
    shape: tuple[int, ...]
    """In elements of that type."""
    nbytes: int
    """Bytes of the dense data."""
    load: Callable[[], Any]
    """Returns the CPU tensor, or the numpy array."""
    array: str = ""
    """numpy's dtype string, if it is an array."""
    origin: tuple[Any, str] | None = None
    """The native checkpoint that has its bytes, and its name there: several are then read at
    once."""


class LazyMemory(NamedTuple):
    """The memory of a tensor that is not loaded yet. Fields: see `Memory`."""

    dtype: str
    shape: tuple[int, ...]
    strides: None
    load: Callable[[], Placed]
    """Called when the first byte is needed."""
    nbytes: int
    owner: LazyTensor

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for one lazy tensor in two places."""
        return ("lazy", id(self.owner))


ItemSpec = tuple[str, Memory, tuple[tuple[int, ...], tuple[int, ...]] | None, bool]
"""An item that a rank writes: the name of a tensor or object, its bytes, the shape of the tensor
and the offsets of its region (None: the whole tensor), and whether it is an object, an opaque byte
string of dtype U8."""


class Target(NamedTuple):
    """A tensor or array that a load fills."""

    value: Any
    """The torch tensor or numpy array; None for other libraries' arrays, which only reads fill."""
    dtype: str
    """safetensors' name of the element type: ``"F32"``."""
    shape: tuple[int, ...]
    """In elements of that type."""
    address: Address
    strides: tuple[int, ...] | None
    """In bytes; None if dense bytes can be read directly to the address."""
    takes_regions: bool = False
    """Whether the native side can read regions into it by its strides."""
    problem: str = ""
    """Why it can't be filled, such as ``"an expanded view"``; empty if it can."""


class Stored(NamedTuple):
    """One tensor of a checkpoint: safetensors' dtype name, shape in elements, size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
