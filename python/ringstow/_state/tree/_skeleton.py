"""Parses a checkpoint's JSON tree into a skeleton: a state dict with `Leaf` for unread values.

Pure, like ``_encode``, which describes the tree. The text may have been tampered with: anything
invalid is a FormatError, and nothing is unpickled here.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, NoReturn

from ringstow import _native
from ringstow._core._errors import FormatError
from ringstow._state.tensors import _numpy
from ringstow._state.tree import _custom_types, _small_values
from ringstow._state.tree._walk import (
    COMPOSITE,
    METADATA,
    STORED,
    Box,
    Leaf,
    check_hashes,
    children,
    metadata_of,
)

DEPTH_MAX = _native.DEPTH_MAX
_INT = re.compile(r"-?(0|[1-9][0-9]*|0x[0-9a-f]+)")
_INT64 = 1 << 63
_FLOATS = {"nan", "inf", "-inf"}


def parse(text: str, path: str) -> dict[Any, Any]:
    """Return the skeleton of the state dict whose tree this is.

    Args:
        text: the JSON text.
        path: the checkpoint's directory, for the messages.

    Raises:
        FormatError: the text is not a tree that ringstow wrote.
    """
    manifest = f"{path}/manifest.json"
    try:
        root = _native.parse_tree(text, _object)
        if root is None:  # something unusual, perhaps an error
            root = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
            if _native.nesting(text) > DEPTH_MAX:
                _check_depth(root)
        if not isinstance(root, dict):
            raise ValueError("it is not a dict")
    except (ValueError, RecursionError) as error:
        message = f"{manifest}: the saved state cannot be read: {error}"
        raise FormatError(message, path=manifest) from None
    return root


def _check_depth(root: Any) -> None:
    """Refuse trees that no save writes, and trees too deep for the recursive walks."""
    level = [root]
    for _ in range(DEPTH_MAX):
        level = [inner for node in level for inner in _inside(node)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")


def _inside(node: Any) -> Iterator[Any]:
    """Yield the containers directly inside a container, also in a dict's keys and metadata."""
    inside: list[Any] = [child for _, child in children(node) or ()]
    if isinstance(node, dict):
        inside += [*node, metadata_of(node)]
    if isinstance(node, Box):
        inside.append(node.context)
    return (inner for inner in inside if children(inner) is not None)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1:
        tag, body = pairs[0]
        if tag == "$tensor" and type(body) is str:  # the usual case
            return Leaf(tag, body)
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    tag = pairs[0][0] if pairs else ""
    if not tag.startswith("$"):
        return fields
    reader = _READERS.get(tag)
    if reader is None:
        raise ValueError(f"a value of the kind {tag!r} is not known (written by a newer version?)")
    read, kinds = reader
    if not fields.keys() <= kinds.keys():
        raise ValueError(f"a value of the kind {tag!r} has unknown fields")
    for name, expected in kinds.items():
        if type(fields.get(name)) not in expected:
            wanted = " or a ".join(kind.__name__ for kind in expected)
            raise ValueError(f"{name!r} does not hold a {wanted}")
    return read(*map(fields.get, kinds))


def _int(digits: str) -> int:
    if not _INT.fullmatch(digits):
        raise ValueError("'$int' does not hold an integer")
    return int(digits, 0)


def _float(name: str) -> float:
    if name not in _FLOATS:
        raise ValueError("'$float' holds something other than nan, inf or -inf")
    return float(name)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dict(body: list[Any]) -> dict[Any, Any]:
    return dict(_pairs(body))


def _deque(items: list[Any], length: int | None) -> collections.deque[Any]:
    if length is not None and not len(items) <= length <= sys.maxsize:
        raise ValueError("'$deque' has more items than its length allows")
    return collections.deque(items, length)


def _defaultdict(
    body: dict[Any, Any] | list[Any], name: str | None
) -> collections.defaultdict[Any, Any]:
    if name is not None and name not in _custom_types.FACTORIES:
        raise ValueError(f"unknown defaultdict factory {name!r}")
    factory = None if name is None else _custom_types.FACTORIES[name]
    return collections.defaultdict(factory, _items(body))


def _odict(
    body: dict[Any, Any] | list[Any], attributes: dict[Any, Any] | None
) -> collections.OrderedDict[Any, Any]:
    result = collections.OrderedDict(_items(body))
    if attributes is not None:
        if attributes.keys() != {METADATA}:
            raise ValueError("'$odict' has unknown attributes")
        result._metadata = attributes[METADATA]  # type: ignore[attr-defined]
    return result


def _items(body: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[tuple[Any, Any]]:
    """Return the items of another kind of dict, stored as an object or as pairs."""
    return body if type(body) is dict else _pairs(body)  # type: ignore[arg-type]


def _pairs(body: list[Any]) -> list[tuple[Any, Any]]:
    if any(type(pair) is not list or len(pair) != 2 for pair in body):
        raise ValueError("a dict is not a list of [key, value]")
    with contextlib.suppress(TypeError):  # the unhashable key is found below
        check_hashes(pair[0] for pair in body)
    keys = set()
    for pair in body:
        try:
            keys.add(pair[0])
            can_be_one = _can_be_key(pair[0])
        except TypeError:
            can_be_one = False
        if not can_be_one:
            raise ValueError("a dict has a key that cannot be one")
    if len(keys) != len(body):
        raise ValueError("a dict has the same key twice")
    return [(key, value) for key, value in body]


def _can_be_key(key: Any) -> bool:
    """Return whether a hashable part of a skeleton may become a key: no save writes others."""
    if type(key) is Leaf:
        return key.tag not in (*STORED, "$counter")
    if type(key) is Box:
        items = key.items.values() if isinstance(key.items, dict) else key.items
        return key.tag not in ("$set", "$namespace") and all(map(_can_be_key, items))
    return type(key) is not tuple or all(map(_can_be_key, key))


def _counter(body: list[Any]) -> Leaf:
    pairs = _pairs(body)
    if any(isinstance(part, Leaf | list | tuple | dict) for pair in pairs for part in pair):
        raise ValueError("'$counter' holds something other than numbers and text")
    return Leaf("$counter", dict(pairs))


def _size(sizes: list[Any]) -> Leaf:
    if any(type(n) is not int or not -_INT64 <= n < _INT64 for n in sizes):
        raise ValueError("'$size' does not hold integers of 64 bits")
    return Leaf("$size", sizes)


def _namespace(name: str, fields: dict[str, Any]) -> Box:
    if name not in _custom_types.NAMESPACES:
        raise ValueError(f"a namespace of the kind {name!r} is unknown")
    return Box("$namespace", name, fields)


def _composite(name: str, tensors: dict[str, Any], context: dict[str, Any]) -> Box:
    if any(name.startswith("$") for name in tensors):
        raise ValueError("'$composite' has a tensor without a name")
    return Box(COMPOSITE, name, tensors, context=context)


def _enum(kind: str, name: str | None, value: int | None) -> Leaf:
    if (name is None) == (value is None):
        raise ValueError("'$enum' has no name and no value, or both")
    return Leaf("$enum", value if name is None else name, kind)


def _value(name: str, args: list[Any]) -> Any:
    if not _small_values.needs(name):
        return _small_values.make(name, args)
    _small_values.check(name, args)
    return Leaf("$value", args, name)


def _ndarray(name: str, dtype: str) -> Leaf:
    return Leaf("$ndarray", name, _checked(dtype))


def _scalar(dtype: str, text: str) -> Leaf:
    data = _bytes(text)
    if len(data) != _numpy.itemsize(_checked(dtype)):
        raise ValueError("'$scalar' does not hold one element")
    return Leaf("$scalar", data, dtype)


def _checked(dtype: str) -> str:
    if _numpy.code_of(dtype) is None:
        raise ValueError(f"the numpy dtype {dtype!r} is not known")
    return dtype


def _leaf(tag: str) -> _Reader:
    return (lambda body: Leaf(tag, body), {tag: _TEXT})


def _set(tag: str) -> _Reader:
    return (lambda items: Box(tag, "", items), {tag: _LIST})


def _with_fields(tag: str) -> _Reader:
    return (lambda name, fields: Box(tag, name, fields), {tag: _TEXT, "fields": _DICT})


_TEXT, _LIST, _DICT, _ITEMS = (str,), (list,), (dict,), (dict, list)
_TEXT_OR_NOT, _INT_OR_NOT, _DICT_OR_NOT = (str, NoneType), (int, NoneType), (dict, NoneType)

_Reader = tuple[Callable[..., Any], dict[str, tuple[type, ...]]]
"""The maker of a value, and its fields, each with the allowed types."""

_READERS: dict[str, _Reader] = {
    "$int": (_int, {"$int": _TEXT}),
    "$float": (_float, {"$float": _TEXT}),
    "$bytes": (_bytes, {"$bytes": _TEXT}),
    "$tuple": (tuple, {"$tuple": _LIST}),
    "$dict": (_dict, {"$dict": _LIST}),
    "$odict": (_odict, {"$odict": _ITEMS, "attrs": _DICT_OR_NOT}),
    "$defaultdict": (_defaultdict, {"$defaultdict": _ITEMS, "factory": _TEXT_OR_NOT}),
    "$deque": (_deque, {"$deque": _LIST, "maxlen": _INT_OR_NOT}),
    "$set": _set("$set"),
    "$frozenset": _set("$frozenset"),
    "$dataclass": _with_fields("$dataclass"),
    "$namedtuple": _with_fields("$namedtuple"),
    COMPOSITE: (_composite, {COMPOSITE: _TEXT, "tensors": _DICT, "context": _DICT}),
    "$namespace": (_namespace, {"$namespace": _TEXT, "fields": _DICT}),
    "$enum": (_enum, {"$enum": _TEXT, "name": _TEXT_OR_NOT, "value": _INT_OR_NOT}),
    "$str": (lambda text, kind: Leaf("$str", text, kind), {"$str": _TEXT, "type": _TEXT}),
    "$value": (_value, {"$value": _TEXT, "args": _LIST}),
    "$counter": (_counter, {"$counter": _LIST}),
    "$size": (_size, {"$size": _LIST}),
    "$dtype": _leaf("$dtype"),
    "$device": _leaf("$device"),
    "$tensor": _leaf("$tensor"),
    "$object": _leaf("$object"),
    "$pickle": _leaf("$pickle"),
    "$ndarray": (_ndarray, {"$ndarray": _TEXT, "dtype": _TEXT}),
    "$scalar": (_scalar, {"$scalar": _TEXT, "data": _TEXT}),
}
