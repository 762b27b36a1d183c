"""Pickles values that the format does not support, if the caller allows it; never tensors.

Pickle would write the bytes of a tensor into the manifest, a third larger and without a name.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from ringstow._state.tensors import _device_arrays, _numpy, _torch
from ringstow._state.tensors._optional_packages import imported
from ringstow._state.tree._refusals import Refused

_PROTOCOL = 4
# Smaller arrays are parts of objects: a scaler's means, a table's bounds.
_ARRAY_MAX = 64 << 10


def dumps(value: object) -> bytes:
    """Return the pickle of a value.

    Raises:
        Refused: the value holds a tensor, an array on a GPU, or an array of more than 64 KiB.
            Exception: the error of a value that can't be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        what = _is_tensor(value)
        if what:
            raise Refused(
                "its tensors and arrays as such, in dicts and lists",
                f"which holds {what}, and is not pickled for that",
            )
        return NotImplemented


def _is_tensor(value: Any) -> str:
    """Return the kind of a value with elements; empty for other values."""
    torch = imported("torch")
    if torch is not None and (
        _torch.is_tensor(value)
        or isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage))
    ):
        return "a tensor"
    numpy = imported("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        is_small = value.nbytes <= _ARRAY_MAX or _numpy.code_of(value.dtype.str) is None
        return "" if is_small else f"an array of {value.nbytes} bytes"
    if not isinstance(value, type) and _device_arrays.interface_of(value) is not None:
        return "an array on a GPU"
    return ""
