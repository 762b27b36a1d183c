"""Objects: byte strings that DCP made with ``torch.save``, or ringstow packed.

Nothing of a pickle runs here unless torch's restricted unpickler, or the caller, allows it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import weakref
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ringstow import _build, _packed
from ringstow._errors import UnsupportedError
from ringstow.dcp._metadata import Entry
from ringstow.dcp._targets import Slice


@dataclasses.dataclass(eq=False)
class Blob:
    """An object's bytes, to be read into memory of their own; or made here, of a value."""

    item: ReadItem
    stream: io.BytesIO
    entry: Entry | None
    """None for what is made here."""
    value: object = None
    """What the stream is unpickled to, where that was made here."""

    @classmethod
    def of(cls, item: ReadItem, entry: Entry) -> Blob:
        """Make room for an object."""
        return cls(item, io.BytesIO(bytes(entry.shape[0])), entry)

    @classmethod
    def made(cls, item: ReadItem, value: object) -> Blob:
        """Return what DCP would have made of a value that ``ringstow.save`` wrote."""
        blob = cls(item, io.BytesIO(), None)
        blob.hold(value)
        return blob

    def hold(self, value: object) -> None:
        """Take what DCP's planner unpickles to this value, in this process and while this lives.

        The value itself is not pickled: a type of the program's could run code of its own on what
        a file said, and come back as something else.
        """
        self.stream, self.value = io.BytesIO(), value
        torch.save(_Held(self), self.stream)

    def slices(self) -> list[Slice]:
        """Return what is to be read; good for as long as the stream is."""
        if self.entry is None or not self.entry.shape[0]:
            return []
        nbytes = self.entry.shape[0]
        with self.stream.getbuffer() as view:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return [(self.entry.name, 0, (0,), (nbytes,), address, (1,))]


# Objects that planners unpickle, by the numbers in their streams: while the reader keeps them.
_held: weakref.WeakValueDictionary[int, Blob] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _Held:
    """Stands for an object's value in a pickle."""

    def __init__(self, blob: Blob) -> None:
        self._number = next(_numbers)
        _held[self._number] = blob

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return _take, (self._number,)


def _take(number: int) -> object:
    """Return the value that a number stands for; torch.load calls this."""
    blob = _held.get(number)
    if blob is None:
        raise UnsupportedError("this object was read by a load that has ended: load it again")
    return blob.value


def check(blobs: list[Blob], path: str, *, allow_pickle: bool) -> None:
    """Refuse objects that only an unrestricted unpickler could load; unpack what is packed.

    Raises:
        UnsupportedError: names each, and what it needs.
        FormatError: a packed object is damaged.
    """
    refused = []
    missing = []
    for blob in blobs:
        name = blob.item.dest_index.fqn
        if blob.entry is None:
            continue
        if _packed.is_packed(blob.stream.getbuffer()):
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
    """Return what an object needs and does not get; None if it is harmless."""
    stream.seek(0)
    try:
        torch.load(stream, map_location="cpu", weights_only=True)
        return None
    except Exception as error:
        return _types(stream) or _reason(str(error))
    finally:
        stream.seek(0)


def _reason(said: str) -> str:
    """Return what torch says of the object itself; the rest of its text is of files in general."""
    lines = (said.partition("WeightsUnpickler error: ")[2] or said).strip().splitlines()
    return f"what it can't get: {lines[0] if lines else 'torch does not say what'}"


def _types(stream: io.BytesIO) -> str | None:
    stream.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    except Exception:
        return None
    return ", ".join(sorted(names)) or None
