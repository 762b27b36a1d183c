"""Converts numpy arrays and scalars to memory and back. numpy is imported on demand."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, TypeGuard

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors._memory import Memory, Stored, Target
from ringstow._state.tensors._optional_packages import imported, require

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
# Dtypes that numpy lacks, and the dtype of the package ml_dtypes to use instead.
EXTENSIONS = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_NAMES = {code: name for name, code in CODES.items()}
_EXTENSION_CODES = {name: code for code, name in EXTENSIONS.items()}
_BY_TORCH = 'load it with framework="torch"'
_DTYPE = re.compile(r"[<>|]([bufic][0-9]{1,2})")


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Return whether the value is exactly an array (not a sub-class), without importing numpy."""
    numpy = imported("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: object) -> TypeGuard[np.generic]:
    """Return whether the value is a numpy scalar, without importing numpy."""
    numpy = imported("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def code_of(dtype: str) -> str | None:
    """Return safetensors' name of a dtype string such as ``"<f4"``; None if it has none."""
    match = _DTYPE.fullmatch(dtype)
    return CODES.get(match[1]) if match else None


def code_of_array(array: np.ndarray[Any, Any]) -> str | None:
    """Return safetensors' name of an array's dtype, also of ml_dtypes, or None."""
    dtype = array.dtype
    return code_of(dtype.str) or _EXTENSION_CODES.get(dtype.name)


def dtype_of(code: str, key: str) -> np.dtype[Any]:
    """Return the dtype that safetensors calls ``"F32"``; the key is for the message.

    Raises:
        UnsupportedError: numpy lacks it, and ml_dtypes is not installed or lacks it too.
    """
    numpy = require("numpy", key)
    if code in _NAMES:
        return numpy.dtype("<" + _NAMES[code])  # type: ignore[no-any-return]
    if code not in EXTENSIONS:
        raise UnsupportedError(f"{key} is {code}, which numpy lacks: {_BY_TORCH}")
    name = EXTENSIONS[code]
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise UnsupportedError(
            f"{key} is {name}, which numpy lacks: install ml_dtypes, which has it, or {_BY_TORCH}"
        ) from error
    if not hasattr(ml_dtypes, name):
        raise UnsupportedError(f"{key}: this ml_dtypes has no {name}; install a newer one")
    return numpy.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return]


def instead_of_torch(tag: str, body: Any, key: str) -> Any:
    """Return the value of a torch.Size, torch.dtype or torch.device without torch.

    Raises:
        UnsupportedError: numpy has no such dtype.
    """
    if tag != "$dtype":
        return tuple(body) if tag == "$size" else body
    if body in _EXTENSION_CODES:
        return dtype_of(_EXTENSION_CODES[body], key)
    try:
        return require("numpy", key).dtype(body)
    except TypeError:
        raise UnsupportedError(f"{key} is torch.{body}, which numpy lacks: {_BY_TORCH}") from None


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a dtype that `code_of` knows."""
    return int(dtype[2:])


def memory_of(array: np.ndarray[Any, Any]) -> Memory:
    """Return the memory of an array; `code_of` must know its dtype.

    The owner is the array itself, or a copy if the native side does not support it: another byte
    order, or negative strides.
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
    """Return a writable array over the block; for another byte order, a swapped copy."""
    numpy = require("numpy", key)
    here = numpy.dtype(dtype).newbyteorder("<")
    if stored.nbytes == 0:
        return numpy.empty(stored.shape, dtype)  # type: ignore[no-any-return]
    array = numpy.frombuffer(block, dtype=here).reshape(stored.shape)
    return array.astype(dtype) if dtype.startswith(">") else array  # type: ignore[no-any-return]


def array_of(block: Any, stored: Stored, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a writable array of a dtype over the block."""
    import numpy

    if stored.nbytes == 0:
        return numpy.empty(stored.shape, dtype)
    return numpy.frombuffer(block, numpy.uint8).view(dtype).reshape(stored.shape)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a new array."""
    import numpy

    return numpy.empty(shape, dtype)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's elements."""
    return array.ctypes.data


def dense(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array if it is dense; otherwise a copy."""
    import numpy

    return numpy.ascontiguousarray(array)


def scalar_from(data: bytes, dtype: str, key: str) -> np.generic:
    """Return the scalar whose bytes these are.

    Raises:
        ValueError: the bytes are not one element of that dtype.
    """
    numpy = require("numpy", key)
    (scalar,) = numpy.frombuffer(data, dtype=dtype)
    return scalar  # type: ignore[no-any-return]


def target_of(array: np.ndarray[Any, Any]) -> Target:
    """Return how a load can fill an array; `code_of_array` must know its dtype."""
    is_dense = array.flags.c_contiguous and not array.dtype.str.startswith(">")
    return Target(
        array,
        code_of_array(array) or "",
        array.shape,
        array.ctypes.data,
        None if is_dense else array.strides,
        problem="" if array.flags.writeable else "a read-only array",
    )


def copy_into(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy the elements, across strides, byte orders and precisions."""
    import numpy

    numpy.copyto(target, source, casting="unsafe")  # numpy does not know ml_dtypes' kinds
