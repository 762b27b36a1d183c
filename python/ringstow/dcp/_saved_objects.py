"""What is saved for an object: bytes that the default load makes the same value of.

DCP's planner makes a ``torch.save`` file of all that is no tensor. What
``torch.load(weights_only=True)`` reads is saved as it is; of the rest, what ringstow has words for
is packed, and what it has none for is refused.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ringstow import _packed
from ringstow._errors import Error
from ringstow._remedies import Refusals, Refused, remedy
from ringstow.dcp import _objects

_UNKNOWN: Any = object()
_PLAIN = (type(None), bool, int, float, str, bytes)


def loadable(
    item: WriteItem, planner: SavePlanner, refusals: Refusals, *, allow_pickle: bool
) -> Any:
    """Return the bytes to save for an object, as the planner gives them or packed.

    Args:
        item: the object's.
        planner: that has the object.
        refusals: where an object is noted that can't be saved; then the bytes are None.
        allow_pickle: save the planner's bytes instead of refusing.
    """
    value = _object_of(item, planner)
    key = item.index.fqn
    try:
        data = planner.resolve_data(item)
    except Exception as error:
        if value is _UNKNOWN:
            raise
        if _packed.pack(key, value, refusals):
            _refuse(key, value, f"which can't be pickled ({error})", refusals)
        return None
    if not isinstance(data, (io.BytesIO, bytes, bytearray)) or _is_plain(value):
        return data
    stream = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    why = _objects.refusal(stream)
    if why is None:
        return data
    try:
        if value is _UNKNOWN:
            value = _unpickled(stream, key, why)
        packed = _packed.pack(key, value, Refusals() if allow_pickle else refusals)
    except Error:
        if not allow_pickle:
            raise
        packed = b""
    if packed:
        return io.BytesIO(packed)
    return data if allow_pickle else None


def _object_of(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object itself, if the planner pickles it as torch's own does."""
    if not isinstance(planner, DefaultSavePlanner):
        return _UNKNOWN
    kind = type(planner)
    is_stock = (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )
    return planner.lookup_object(item.index) if is_stock else _UNKNOWN


def _is_plain(value: Any) -> bool:
    """Tell whether a value needs no look at its pickle: nearly all are numbers and text."""
    kind = type(value)
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return kind in _PLAIN


def _refuse(key: str, value: Any, reason: str, refusals: Refusals) -> None:
    refusals.add_value(key, value, Refused(remedy(value), reason), pickled=True)


def _unpickled(stream: io.BytesIO, key: str, why: str) -> Any:
    """Return the object that a planner of another kind has just pickled in this process.

    Raises:
        Error: the bytes are no file of torch.save's.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=False)
    except Exception as error:
        raise Error(
            f"{key}: the planner's bytes are none that torch.load reads ({error}), and need {why}: "
            "give StorageWriter(allow_pickle=True), and StorageReader(allow_pickle=True) to load "
            "them"
        ) from None
    finally:
        stream.seek(0)
