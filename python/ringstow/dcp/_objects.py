"""Objects: byte strings that DCP's planner made with ``torch.save``, or that ringstow packed.

A save stores pickles that ``torch.load(weights_only=True)`` reads unchanged. It packs other objects
of types that ringstow supports, and refuses the rest. A load runs no code of a pickle unless
torch's restricted unpickler or the caller allows it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlanner, WriteItem

from ringstow._core._errors import Error, UnsupportedError
from ringstow._reading._shard_boxes import Boxed
from ringstow._state.tree import _build, _cycles, _packed_values
from ringstow._state.tree._refusals import Refusals, Refused, remedy
from ringstow.dcp import _private
from ringstow.dcp._metadata import Entry
from ringstow.dcp._targets import Slice


@dataclasses.dataclass(eq=False)
class Blob:
    """An object's bytes: read into new memory, or made here from a value."""

    item: ReadItem
    stream: io.BytesIO
    entry: Entry | None
    """None if the value is made here."""
    value: object = None
    """The value that DCP's planner gets for the stream, if it is made here."""
    is_filled: bool = False
    """Whether the value is copied into the state's tensor, which stays."""
    boxes: list[Boxed] = dataclasses.field(default_factory=list)
    """The regions to read into the value, a DTensor of wrappers."""

    @classmethod
    def of(cls, item: ReadItem, entry: Entry) -> Blob:
        """Allocate memory for an object."""
        return cls(item, io.BytesIO(bytes(entry.shape[0])), entry)

    @classmethod
    def made(cls, item: ReadItem, value: object) -> Blob:
        """Return the object that DCP would have made from a value that ``ringstow.save`` wrote."""
        blob = cls(item, io.BytesIO(), None)
        blob.hold(value)
        return blob

    def hold(self, value: object) -> None:
        """Make a stream that DCP's planner unpickles to this value, while this object lives.

        The value itself is not pickled: a type of the program could run code on a file's contents,
        and return something else.
        """
        self.stream, self.value = io.BytesIO(), value
        torch.save(_Held(self), self.stream)

    def slices(self) -> list[Slice]:
        """Return the read request; valid while the stream lives."""
        if self.entry is None or not self.entry.shape[0]:
            return []
        nbytes = self.entry.shape[0]
        with self.stream.getbuffer() as view:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return [(self.entry.name, 0, (0,), (nbytes,), address, (1,))]


# Objects that planners unpickle, by the numbers in their streams; a reader keeps them alive.
_held: weakref.WeakValueDictionary[int, Blob] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _Held:
    """A placeholder for an object's value in a pickle."""

    def __init__(self, blob: Blob) -> None:
        self._number = next(_numbers)
        _held[self._number] = blob

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return _take, (self._number,)


def _take(number: int) -> object:
    """Return the value of a placeholder's number; torch.load calls this."""
    blob = _held.get(number)
    if blob is None:
        raise UnsupportedError("this object is from a load that has ended: load it again")
    return blob.value


def check(blobs: list[Blob], path: str, *, allow_pickle: bool) -> None:
    """Refuse objects that need an unrestricted unpickler; unpack packed objects.

    Raises:
        UnsupportedError: names each refused object, and what it needs.
        FormatError: a packed object is damaged.
    """
    refused = []
    missing = []
    for blob in blobs:
        name = blob.item.dest_index.fqn
        if blob.entry is None:
            continue
        if _packed_values.is_packed(blob.stream.getbuffer()):
            try:
                blob.hold(_build.unpack(blob.stream.getvalue(), path, name))
            except UnsupportedError as error:
                missing.append(str(error))
        elif not allow_pickle and (why := refusal(blob.stream)) is not None:
            refused.append(f"{name} needs {why}")
    if refused:
        missing.append(
            f"{path}: objects that torch.load(weights_only=True) refuses, because loading them "
            f"can run any code: {'; '.join(refused)}. If you trust the checkpoint, name the "
            "types with torch.serialization.add_safe_globals, or give "
            "StorageReader(allow_pickle=True)"
        )
    if missing:
        raise UnsupportedError("\n".join(missing))


def refusal(stream: io.BytesIO) -> str | None:
    """Return what the restricted unpickler refuses in an object; None if it accepts the object."""
    stream.seek(0)
    try:
        torch.load(stream, map_location="cpu", weights_only=True)
        return None
    except Exception as error:
        return _types(stream) or f"what it can't get: {_private.refusal_of(error)}"
    finally:
        stream.seek(0)


def _types(stream: io.BytesIO) -> str | None:
    stream.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    except Exception:
        return None
    return ", ".join(sorted(names)) or None


_UNKNOWN: Any = object()
_PLAIN = (type(None), bool, int, float, str, bytes)


def loadable(
    item: WriteItem, planner: SavePlanner, refusals: Refusals, *, allow_pickle: bool
) -> Any:
    """Return the bytes to save for an object, as the planner gives them or packed.

    Args:
        item: the object's item.
        planner: the planner that has the object.
        refusals: collects objects that can't be saved; the result is then None.
        allow_pickle: save the planner's bytes instead of refusing.
    """
    value = _object_of(item, planner)
    key = item.index.fqn
    try:
        data = planner.resolve_data(item)
    except Exception as error:
        if value is _UNKNOWN:
            raise
        if _packed_values.pack(key, value, refusals):
            refused = Refused(remedy(value), f"which can't be pickled ({error})")
            refusals.add_value(key, value, refused, pickled=True)
        return None
    if not isinstance(data, (io.BytesIO, bytes, bytearray)) or _is_plain(value):
        return data
    stream = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    why = refusal(stream)
    if why is None:
        return data
    try:
        if value is _UNKNOWN:
            value = _unpickled(stream, key, why)
        packed = _packed_values.pack(key, value, Refusals() if allow_pickle else refusals)
    except Error:
        if not allow_pickle:
            raise
        packed = b""
    if packed:
        return io.BytesIO(packed)
    return data if allow_pickle else None


def _object_of(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object itself, if the planner pickles it as torch's own planner does."""
    if not isinstance(planner, DefaultSavePlanner):
        return _UNKNOWN
    kind = type(planner)
    is_stock = (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )
    return planner.lookup_object(item.index) if is_stock else _UNKNOWN


def _is_plain(value: Any) -> bool:
    """Return whether a value's pickle needs no check: most values are numbers and text."""
    found = map(type, _cycles.reached(value, lambda one: one if type(one) in (list, tuple) else ()))
    return all(kind in (*_PLAIN, list, tuple) for kind in found)


def _unpickled(stream: io.BytesIO, key: str, why: str) -> Any:
    """Return the object that a planner of another kind has just pickled in this process.

    Raises:
        Error: torch.load can't read the bytes.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=False)
    except Exception as error:
        raise Error(
            f"{key}: torch.load can't read the planner's bytes ({error}), which need {why}: give "
            "StorageWriter(allow_pickle=True), and StorageReader(allow_pickle=True) to load them"
        ) from None
    finally:
        stream.seek(0)
