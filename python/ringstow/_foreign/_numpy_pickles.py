"""Reads numpy arrays and scalars in pickles without numpy's own ``__setstate__``.

``dtype.__setstate__`` trusts the fields and flags in a pickle: bytes of the file could then be used
as pointers. The classes here replace numpy's, and accept only bytes and plain dtypes.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

_PLAIN = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,9}")
_ORDERS = ("<", ">", "|", "=")
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 1, numpy 2


class _Dtype:
    """Replaces numpy's dtype while a pickle is read. `with_arrays` then returns the real one."""

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if type(code) is not str or _PLAIN.fullmatch(code) is None:
            raise pickle.UnpicklingError(f"it has a numpy dtype that is not plain: {code!r:.100}")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if type(order) is not str or order not in _ORDERS:
            raise ValueError(f"{order!r:.100} is not an order of bytes")
        self._order = order
        # Refuse instead of ignoring: a program that unpickles the same bytes itself would trust
        # them.
        if tuple(state) != self.real().__reduce__()[2]:
            raise pickle.UnpicklingError(f"it has a numpy dtype {self._code} that is not plain")

    def real(self) -> Any:
        """Return the dtype."""
        import numpy

        dtype: Any = numpy.dtype(self._code)
        return dtype.newbyteorder(self._order)


class _Elements:
    """The elements of an array or scalar: checked, but not copied yet."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], data: Any, order: Any) -> None:
        if type(dtype) is not _Dtype or type(data) is not bytes:
            raise pickle.UnpicklingError(
                "it has an array or scalar of numpy that is not plain bytes"
            )
        self._dtype, self._shape, self.data, self._order = dtype.real(), shape, data, order
        if len(data) != math.prod(shape) * self._dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are not {shape} elements of {self._dtype}")

    def copied(self) -> Any:
        """Return the elements as an array."""
        import numpy

        array: Any = numpy.ndarray(self._shape, self._dtype, self.data, order=self._order)
        return array.astype(self._dtype.newbyteorder("="))  # as numpy does; a copy


class _Array:
    """Replaces numpy's array while a pickle is read. `with_arrays` then returns the real one."""

    __hash__ = None  # type: ignore[assignment]  # so that no key of a dict hides one
    elements: _Elements | None = None

    def __setstate__(self, state: Any) -> None:
        shape, dtype, is_fortran, data = state[-4:]
        self.elements = _Elements(dtype, tuple(shape), data, "F" if is_fortran else "C")


class _Scalar:
    """Replaces numpy's scalar while a pickle is read."""

    def __init__(self, dtype: Any, data: Any = None) -> None:
        self.elements = _Elements(dtype, (), data, "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _no_bytes() -> bytes:
    """Return empty bytes: protocol 2 pickles an empty array's elements as a call of ``bytes``."""
    return b""


def replacements() -> dict[str, Any]:
    """Return the replacement for each of numpy's names; empty without numpy."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        return {}
    named: dict[str, Any] = {f"{module}._reconstruct": _reconstruct for module in _MODULES}
    named |= {f"{module}.scalar": _Scalar for module in _MODULES}
    named["builtins.bytes"] = _no_bytes
    return {**named, "numpy.dtype": _Dtype, "numpy.ndarray": _Array}


def with_arrays(value: Any) -> Any:
    """Return a value that was unpickled with `replacements`, with its arrays and dtypes.

    Changes containers and attributes of objects in place; a value may contain itself.
    """
    return _replaced(value, {})


def _replaced(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if type(value) in (_Array, _Scalar):
        seen[id(value)] = made = _copied(value, seen)
        return made
    if type(value) is _Dtype:
        return value.real()
    if type(value) in (tuple, frozenset):
        made = [_replaced(one, seen) for one in value]
        is_same = all(new is old for new, old in zip(made, value, strict=True))
        seen[id(value)] = whole = value if is_same else type(value)(made)
        return whole
    seen[id(value)] = value
    if isinstance(value, dict):
        _replace_items(value, seen)
    elif isinstance(value, list):
        value[:] = [_replaced(one, seen) for one in value]
    elif isinstance(value, set) and any(type(one) in _IN_SETS for one in value):
        items = [_replaced(one, seen) for one in value]
        value.clear()
        value.update(items)
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:  # a class's ``__dict__`` is not a dict
        _replaced(attributes, seen)
    return value


_IN_SETS = (_Dtype, _Scalar, tuple, frozenset)
# numpy never pickles the same bytes for two arrays, and each copy takes memory.
_SHARED_BYTES_MAX = 1024


def _copied(value: _Array | _Scalar, seen: dict[int, Any]) -> Any:
    elements = value.elements
    if elements is None:
        raise ValueError("an array of numpy has no elements")
    if len(elements.data) > _SHARED_BYTES_MAX:
        if id(elements.data) in seen:
            raise ValueError(f"several arrays of numpy have the same {len(elements.data)} bytes")
        seen[id(elements.data)] = elements.data
    array = elements.copied()
    return array if type(value) is _Array else array[()]


def _replace_items(value: dict[Any, Any], seen: dict[int, Any]) -> None:
    keys = {key: _replaced(key, seen) for key in value}
    if any(made is not key for key, made in keys.items()):  # keep the order
        items = [(keys[key], one) for key, one in value.items()]
        value.clear()
        value.update(items)
    for key, one in value.items():
        value[key] = _replaced(one, seen)
