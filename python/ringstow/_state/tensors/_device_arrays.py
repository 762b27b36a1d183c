"""Arrays of other libraries on a GPU, such as CuPy's and Numba's, by their common protocol.

``__cuda_array_interface__``, versions 0 to 3; see Numba's documentation of it. None of these
libraries is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.tensors import _cuda, _numpy
from ringstow._state.tensors._memory import Memory, Target, dense_strides, share_elements

VERSION_MAX = 3
# Stream handles with a special meaning in CUDA.
LEGACY_STREAM = 1


class DeviceArray(NamedTuple):
    """An array on a GPU."""

    memory: Memory
    """The owner is the library's array."""
    typestr: str
    """The dtype in numpy's notation: ``"<f4"``."""
    is_readonly: bool


def interface_of(value: object) -> Mapping[str, Any] | None:
    """Return an object's ``__cuda_array_interface__``; None if it has none."""
    interface = getattr(value, "__cuda_array_interface__", None)
    return interface if isinstance(interface, Mapping) else None


def parse(value: object, interface: Mapping[str, Any], key: str) -> DeviceArray:
    """Return the address of an array's elements, and the stream on which they are ready.

    Raises:
        UnsupportedError: a kind of array that can't be saved; says what to do.
        InvalidStateError: the object breaks the protocol.
    """
    try:
        shape = tuple(int(n) for n in interface["shape"])
        typestr = str(interface["typestr"])
        pointer, is_readonly = interface["data"]
        version = int(interface["version"])
        strides = interface.get("strides")
        strides = None if strides is None else tuple(int(step) for step in strides)
        stream = _stream(interface.get("stream"))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidStateError(
            f"{key}: its __cuda_array_interface__ breaks the protocol: "
            f"{type(error).__name__}: {error}"
        ) from None
    if version > VERSION_MAX:
        raise UnsupportedError(
            f"{key}: its __cuda_array_interface__ is of version {version}, and versions up to "
            f"{VERSION_MAX} are known here; use a numpy array made from it"
        )
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{key} is a masked array on a GPU; use its data and its mask")
    code = _code(typestr, key)
    size = _numpy.itemsize(typestr)
    dense = dense_strides(shape, size)
    strides = dense if strides is None else _checked(shape, strides, key)
    is_dense = all(n == 1 or s == d for n, s, d in zip(shape, strides, dense, strict=True))
    nbytes = math.prod(shape) * size
    where = (pointer, _cuda.device_at(pointer, key), stream) if nbytes else 0
    memory = Memory(code, shape, None if is_dense or not nbytes else strides, where, nbytes, value)
    return DeviceArray(memory, typestr, bool(is_readonly))


def _stream(stream: Any) -> int:
    """Return the stream on which the data is ready.

    None means that no wait is needed. Before version 3 the protocol had no stream: use the default
    stream, which the libraries use by default.
    """
    if stream is None:
        return LEGACY_STREAM
    if int(stream) == 0:
        raise ValueError("its stream is 0, which is ambiguous")
    return int(stream)


def _code(typestr: str, key: str) -> str:
    code = _numpy.code_of(typestr)
    if code is None or typestr.startswith(">"):
        raise UnsupportedError(
            f"{key} is an array of {typestr!r} on a GPU, which can't be saved; use it as an array "
            "of little-endian numbers of 1 to 16 bytes"
        )
    return code


def _checked(shape: tuple[int, ...], strides: tuple[int, ...], key: str) -> tuple[int, ...]:
    """Return the strides if the native side accepts them."""
    if len(strides) != len(shape):
        raise InvalidStateError(f"{key} has {len(shape)} dimensions and {len(strides)} strides")
    if min(strides, default=0) < 0:
        raise UnsupportedError(f"{key} is on a GPU and runs backwards; make it a dense copy")
    return strides


def target_of(value: object, interface: Mapping[str, Any], key: str) -> Target:
    """Return how a load can fill an array of this interface. Raises errors of `parse`."""
    memory, _, is_readonly = parse(value, interface, key)
    dtype, shape, strides, address, *_ = memory
    problem = "a read-only array" if is_readonly else ""
    if strides is not None and share_elements(shape, strides):
        problem = "a broadcast array"
    return Target(None, dtype, shape, address, strides, takes_regions=True, problem=problem)
