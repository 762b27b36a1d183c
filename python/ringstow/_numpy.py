"""numpy's arrays and scalars to memory and back. numpy is looked up when needed, never required."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeGuard

from ringstow._memory import Memory, Stored
from ringstow._optional import imported, require

if TYPE_CHECKING:
    import numpy as np

# numpy's kind and size of each dtype that can be saved, and safetensors' name of it.
CODES = {
    "b1": "BOOL",
    "u1": "U8",
    "u2": "U16",
    "u4": "U32",
    "u8": "U64",
    "i1": "I8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
    "c16": "C128",
}
_DTYPE = re.compile(r"[<>|]([bufic][0-9]{1,2})")


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Tell whether the value is exactly an array (not a sub-class), without importing numpy."""
    numpy = imported("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: object) -> TypeGuard[np.generic]:
    """Tell whether the value is a numpy scalar, without importing numpy."""
    numpy = imported("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def code_of(dtype: str) -> str | None:
    """Return safetensors' name of a dtype string such as ``"<f4"``; None where it has none."""
    match = _DTYPE.fullmatch(dtype)
    return CODES.get(match[1]) if match else None


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a dtype that `code_of` knows."""
    return int(dtype[2:])


def memory_of(array: np.ndarray[Any, Any]) -> Memory:
    """Return where an array's elements lie; its dtype must be one that `code_of` knows.

    The owner is the array itself, or a copy where the native side can't take it as it is: another
    byte order, or strides that run backwards.
    """
    import numpy

    plain = array
    if array.dtype.str.startswith(">"):
        plain = array.astype(array.dtype.newbyteorder("<"))
    if min(plain.strides, default=0) < 0:
        plain = numpy.ascontiguousarray(plain)
    code = code_of(plain.dtype.str)
    assert code is not None, "the caller checks the dtype"
    return Memory(
        code,
        plain.shape,
        None if plain.flags.c_contiguous else plain.strides,
        plain.ctypes.data,
        plain.nbytes,
        plain,
    )


def array_over(block: Any, stored: Stored, dtype: str, key: str) -> np.ndarray[Any, Any]:
    """Return a writable array over the block; one of another byte order is a swapped copy."""
    numpy = require("numpy", key)
    here = numpy.dtype(dtype).newbyteorder("<")
    if stored.nbytes == 0:
        return numpy.empty(stored.shape, dtype)  # type: ignore[no-any-return]
    array = numpy.frombuffer(block, dtype=here).reshape(stored.shape)
    return array.astype(dtype) if dtype.startswith(">") else array  # type: ignore[no-any-return]


def scalar_from(data: bytes, dtype: str, key: str) -> np.generic:
    """Return the scalar whose bytes these are.

    Raises:
        ValueError: the bytes are not one element of that dtype.
    """
    numpy = require("numpy", key)
    (scalar,) = numpy.frombuffer(data, dtype=dtype)
    return scalar  # type: ignore[no-any-return]


def can_take_bytes(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether dense little-endian bytes written to the array's address are its elements."""
    return array.flags.c_contiguous and not array.dtype.str.startswith(">")


def copy_into(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy the elements, across strides and byte orders."""
    import numpy

    numpy.copyto(target, source)
