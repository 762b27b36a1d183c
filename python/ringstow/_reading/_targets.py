"""Whether a load fills, replaces or refuses a value of a state dict. Pure."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ringstow._core._errors import Error
from ringstow._state.objects._detection import is_stateful
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tensors import _device_arrays, _numpy, _torch
from ringstow._state.tensors._memory import Stored
from ringstow._state.tree import _custom_types, _cycles
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._encode import encode
from ringstow._state.tree._refusals import Refusals, Refused, type_name
from ringstow._state.tree._similar_names import Gap
from ringstow._state.tree._walk import COMPOSITE, Box, Leaf, Path

SEQUENCES = (list, tuple, collections.deque)
DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_PLAIN = {type(None), bool, int, float, str, *DICTS, *SEQUENCES, collections.Counter}


def holds_tensors(value: Any) -> bool:
    """Return whether a value, or a part of a skeleton, holds values to fill in place."""
    return holds(value, _is_filled)


def holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Return whether a value, or a value at any depth in it, is wanted."""
    return any(map(wanted, _cycles.reached(value, _inside)))


def _is_filled(value: Any) -> bool:
    if isinstance(value, Leaf):
        return value.tag in ("$tensor", "$ndarray")
    return type(value) is PerRank or is_stateful(value) or is_array(value)


def _inside(value: Any) -> Iterator[Any]:
    if not (isinstance(value, Leaf) or is_stateful(value)):
        with contextlib.suppress(Refused):  # its fields are not its whole state: `_has_a_place`
            yield from (item for _, item in _custom_types.parts(value) or ())


# Dtypes that `cast` converts between. Not integers: they could overflow or lose a fraction.
_FAMILIES = (
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"},
    {"C128", "C64", "C32"},
)


def can_cast(stored: Stored, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether ``cast=True`` converts a stored tensor to that dtype and shape."""
    if stored.dtype == dtype or stored.shape != shape:
        return False
    return any({stored.dtype, dtype} <= family for family in _FAMILIES)


def leaves(
    value: Any, path: Path, parts: Parts | None = None, above: tuple[int, ...] = ()
) -> Iterator[Gap]:
    """Yield paths and values in a value and its objects; a list without tensors is one value.

    A container that contains itself is one value: ``above`` has the ids of the containers around
    it.
    """
    part = None if parts is None else parts.of(value)
    if part is not None:
        value = part.state
    if id(value) in above:
        pairs: Any = None
    elif isinstance(value, dict):
        pairs = value.items()
    elif type(value) in SEQUENCES and holds_tensors(value):
        pairs = enumerate(value)
    else:
        pairs = None
    if pairs is None:
        yield path, value
        return
    for key, item in pairs:
        yield from leaves(item, (*path, key), parts, (*above, id(value)))


def is_array(value: Any) -> bool:
    return (
        _torch.is_tensor(value)
        or _numpy.is_array(value)
        or _device_arrays.interface_of(value) is not None
    )


def has_a_place(value: Any) -> bool:
    """Return whether a save accepts a value, so that a load may replace it.

    Any other value is an object of the program, which may also refer to it elsewhere.
    """
    if type(value) in _PLAIN or isinstance(value, DamagedTensor):
        return True
    refusals = Refusals()
    with contextlib.suppress(Error):
        encode({"x": value}, refusals=refusals)
    return not refusals


def kind_there(node: Any) -> str:
    if isinstance(node, Box):
        if node.tag == COMPOSITE and ":" not in node.name:
            return f"a {node.name} tensor"
        return f"a {node.name.replace(':', '.') or node.tag[1:]}"
    if not isinstance(node, Leaf):
        return f"a {type_name(node)}"
    kinds = {"$tensor": "a tensor", "$ndarray": "a numpy array", "$pickle": "a pickled value"}
    kinds["$object"] = "an object"
    return kinds.get(node.tag, f"a {node.tag[1:]}")
