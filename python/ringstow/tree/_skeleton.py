"""A checkpoint's JSON tree to a skeleton: the state dict with a `Leaf` for what is not read yet.

Pure, like ``_encode``, which describes the tree. The text may have been tampered with: whatever it
cannot be is a FormatError, and nothing is unpickled here.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from ringstow._errors import FormatError
from ringstow.tensors import _numpy
from ringstow.tree import _fixed, _program
from ringstow.tree._encode import Attribute, Path, flat_name

# The fields that a tagged object may have beside its tag.
_FIELDS = {
    "$odict": {"attrs"},
    "$ndarray": {"dtype"},
    "$scalar": {"data"},
    "$deque": {"maxlen"},
    "$defaultdict": {"factory"},
    "$dataclass": {"fields"},
    "$namedtuple": {"fields"},
    "$namespace": {"fields"},
    "$enum": {"name", "value"},
    "$str": {"type"},
    "$value": {"args"},
}
# The tags whose body is the name of an entry of the manifest.
STORED = ("$tensor", "$ndarray", "$object")
_INT = re.compile(r"-?(0|[1-9][0-9]*|0x[0-9a-f]+)")
_FLOATS = {"nan", "inf", "-inf"}

Fields = dict[str, Any]


@dataclasses.dataclass(eq=False, slots=True)
class Leaf:
    """A value that needs its tensor's bytes, torch, numpy, a type or pickle to be made.

    ``tag`` is the tree's: ``"$tensor"``; ``body`` what it holds: the tensor's name, for one.
    """

    tag: str
    body: Any
    dtype: str = ""
    """numpy's dtype string, for arrays and scalars; the type's name, for an Enum or a str."""

    def __repr__(self) -> str:
        """Return what a flat name shows of a leaf that is a dict's key."""
        return f"torch.{self.body}" if self.tag == "$dtype" else f"<{self.tag[1:]}>"


@dataclasses.dataclass(eq=False, slots=True)
class Box:
    """A container that can be made only when its items are there: a set, or one with fields.

    ``tag`` is the tree's: ``"$set"``, ``"$dataclass"``; ``name`` that of the type.
    """

    tag: str
    name: str
    items: list[Any] | dict[str, Any]
    """Of a set in a list; of all else by the field's name."""

    def __repr__(self) -> str:
        """Return what a flat name shows of one that is a dict's key."""
        return f"<{self.tag[1:]}>"

    def steps(self) -> list[tuple[Any, Any]]:
        """Return the (step of the path, item) pairs."""
        if isinstance(self.items, dict):
            return [(Attribute(name), item) for name, item in self.items.items()]
        return list(enumerate(self.items))


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
        root = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        if not isinstance(root, dict):
            raise ValueError("it is not a dict")
    except (ValueError, RecursionError) as error:
        message = f"{manifest}: the saved state cannot be read: {error}"
        raise FormatError(message, path=manifest) from None
    return root


def children(node: object) -> Iterator[tuple[Any, Any]] | None:
    """Return the (key or index, child) pairs of a container that has any, else None."""
    if isinstance(node, dict) and node:
        return iter(node.items())
    if isinstance(node, (list, tuple, collections.deque)) and node:
        return iter(enumerate(node))
    if type(node) is Box and node.items:
        return iter(node.steps())
    return None


def parts(node: object) -> Iterator[tuple[Any, Any]] | None:
    """Return what `children` does; and the fields of a dataclass, named tuple or namespace."""
    pairs = children(node)
    if pairs is None and _program.has_fields(node):
        taken = _program.fields_of(node)
        return None if taken is None else iter((Attribute(n), v) for n, v in taken.fields.items())
    return pairs


def leaves(node: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of all that is no container; an empty container is a leaf too."""
    pairs = children(node)
    if pairs is None:
        yield path, node
        return
    for key, child in pairs:
        yield from leaves(child, (*path, key))


def rebuild(node: Any, path: Path, make: Callable[[Any, Path], Any]) -> Any:
    """Return a copy of a skeleton with ``make(leaf, path)`` in place of each `Leaf` and `Box`.

    A box that is handed to ``make`` has what was made of its items.
    """
    kind = type(node)
    if kind is Leaf:
        return make(node, path)
    if kind in _DICTS:
        return _rebuild_dict(node, path, make)
    if kind in _LISTS:
        # A loop, not a comprehension: that would be one more frame on the way down.
        items = []
        for index, child in enumerate(node):
            items.append(rebuild(child, (*path, index), make))
        return items if kind is list else like(node, items)
    if kind is Box:
        made = []
        for step, child in node.steps():
            made.append(rebuild(child, (*path, step), make))
        return make(with_items(node, made), path)
    return node


def like(node: Any, items: Iterable[Any]) -> Any:
    """Return a container of the same kind as a list, tuple, deque or dict, with other items."""
    if type(node) is collections.deque:
        return collections.deque(items, node.maxlen)
    if type(node) is collections.defaultdict:
        return collections.defaultdict(node.default_factory, items)
    return type(node)(items)


def with_items(box: Box, items: list[Any]) -> Box:
    """Return a box with other items in the same order."""
    if isinstance(box.items, dict):
        return Box(box.tag, box.name, dict(zip(box.items, items, strict=True)))
    return Box(box.tag, box.name, items)


def rebuild_key(key: Any, path: Path, make: Callable[[Any, Path], Any]) -> Any:
    """Return the dict key that a skeleton's key stands for."""
    is_made = type(key) in (Leaf, tuple, Box)
    return rebuild(key, (*path, "<key>"), make) if is_made else key


def _rebuild_dict(node: dict[Any, Any], path: Path, make: Callable[[Any, Path], Any]) -> Any:
    result: dict[Any, Any] = like(node, ())
    for key, child in node.items():
        at = (*path, key)
        made = key if type(key) is str else rebuild_key(key, path, make)
        result[made] = make(child, at) if type(child) is Leaf else rebuild(child, at, make)
    metadata = metadata_of(node)
    if metadata is not None:
        value = rebuild(metadata, (*path, METADATA), make)
        result._metadata = value  # type: ignore[attr-defined]
    return result


_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = (list, tuple, collections.deque)


def leaf_name(path: Path, node: object) -> str:
    """Return the flat name of a leaf.

    It is the name under which its tensor is stored, unless that is another leaf's, with which
    this one shares memory.
    """
    name = flat_name(path)
    if isinstance(node, Leaf) and node.tag in STORED:
        stored: str = node.body
        if stored.startswith(f"{name}#"):
            return stored
    return name


def stored_in(node: Any) -> list[str]:
    """Return the names of the tensors and objects that a skeleton refers to, each once."""
    names: dict[str, None] = {}

    def note(leaf: Leaf | Box, path: Path) -> Leaf | Box:
        if isinstance(leaf, Leaf) and leaf.tag in STORED:
            names[leaf.body] = None
        return leaf

    rebuild(node, (), note)
    return list(names)


def find(node: Any, name: str, path: Path = ()) -> tuple[Path, Any] | None:
    """Return the path and node of what has a name, a path joined by dots; None if nothing has."""
    for key, child in children(node) or ():
        step, at = flat_name((key,)), (*path, key)
        if name in (step, leaf_name(at, child)):
            return at, child
        if name.startswith(f"{step}."):
            found = find(child, name[len(step) + 1 :], at)
            if found is not None:
                return found
    return None


def metadata_of(node: object) -> Any:
    """Return the ``_metadata`` that an OrderedDict carries; None if it carries none."""
    return getattr(node, "_metadata", None) if isinstance(node, collections.OrderedDict) else None


METADATA = Attribute("_metadata")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1:
        tag, body = pairs[0]
        if tag == "$tensor" and type(body) is str:  # nearly all that there is
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
    if not fields.keys() - {tag} <= _FIELDS.get(tag, set()):
        raise ValueError(f"a value of the kind {tag!r} has unknown fields")
    return reader(fields)


def _take(fields: Fields, name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name!r} does not hold a {kind.__name__}")
    return value


def _int(fields: Fields) -> int:
    digits = _take(fields, "$int", str)
    if not _INT.fullmatch(digits):
        raise ValueError("'$int' does not hold an integer")
    return int(digits, 0)


def _float(fields: Fields) -> float:
    name = _take(fields, "$float", str)
    if name not in _FLOATS:
        raise ValueError("'$float' holds something else than nan, inf or -inf")
    return float(name)


def _bytes(fields: Fields) -> bytes:
    return base64.b64decode(_take(fields, "$bytes", str), validate=True)


def _tuple(fields: Fields) -> tuple[Any, ...]:
    return tuple(_take(fields, "$tuple", list))


def _dict(fields: Fields) -> dict[Any, Any]:
    return dict(_pairs(_take(fields, "$dict", list)))


def _deque(fields: Fields) -> collections.deque[Any]:
    items = _take(fields, "$deque", list)
    length = fields.get("maxlen")
    if length is not None and (type(length) is not int or not len(items) <= length <= sys.maxsize):
        raise ValueError("'$deque' has more items than its length allows")
    return collections.deque(items, length)


def _defaultdict(fields: Fields) -> collections.defaultdict[Any, Any]:
    name = fields.get("factory")
    if name is not None and (type(name) is not str or name not in _program.FACTORIES):
        raise ValueError(f"a defaultdict that makes {name!r} is unknown")
    items = _items(fields, "$defaultdict")
    return collections.defaultdict(None if name is None else _program.FACTORIES[name], items)


def _items(fields: Fields, tag: str) -> dict[Any, Any] | list[tuple[Any, Any]]:
    """Return the items of a dict of another kind, which has an object or pairs."""
    body = fields[tag]
    return body if type(body) is dict else _pairs(_take(fields, tag, list))


def _odict(fields: Fields) -> collections.OrderedDict[Any, Any]:
    result = collections.OrderedDict(_items(fields, "$odict"))
    if "attrs" in fields:
        attributes = _take(fields, "attrs", dict)
        if attributes.keys() != {METADATA}:
            raise ValueError("'$odict' has unknown attributes")
        result._metadata = attributes[METADATA]  # type: ignore[attr-defined]
    return result


def _pairs(body: list[Any]) -> list[tuple[Any, Any]]:
    keys = set()
    for pair in body:
        if type(pair) is not list or len(pair) != 2:
            raise ValueError("a dict is not a list of [key, value]")
        try:
            keys.add(pair[0])
        except TypeError:
            raise ValueError("a dict has a key that cannot be one") from None
        if type(pair[0]) is Box and pair[0].tag in ("$set", "$namespace"):
            raise ValueError("a dict has a key that cannot be one")
    if len(keys) != len(body):
        raise ValueError("a dict has the same key twice")
    return [(key, value) for key, value in body]


def _counter(fields: Fields) -> Leaf:
    pairs = _pairs(_take(fields, "$counter", list))
    if any(isinstance(part, Leaf | list | tuple | dict) for pair in pairs for part in pair):
        raise ValueError("'$counter' holds something else than numbers and text")
    return Leaf("$counter", dict(pairs))


def _size(fields: Fields) -> Leaf:
    sizes = _take(fields, "$size", list)
    if any(type(n) is not int for n in sizes):
        raise ValueError("'$size' does not hold integers")
    return Leaf("$size", sizes)


def _named(tag: str) -> Callable[[Fields], Leaf]:
    return lambda fields: Leaf(tag, _take(fields, tag, str))


def _boxed_set(tag: str) -> Callable[[Fields], Box]:
    return lambda fields: Box(tag, "", _take(fields, tag, list))


def _boxed_fields(tag: str) -> Callable[[Fields], Box]:
    return lambda fields: Box(tag, _take(fields, tag, str), _take(fields, "fields", dict))


def _namespace(fields: Fields) -> Box:
    box = _boxed_fields("$namespace")(fields)
    if box.name not in _program.NAMESPACES:
        raise ValueError(f"a namespace of the kind {box.name!r} is unknown")
    return box


def _enum(fields: Fields) -> Leaf:
    field, kind = ("name", str) if "name" in fields else ("value", int)
    return Leaf("$enum", _take(fields, field, kind), _take(fields, "$enum", str))


def _str(fields: Fields) -> Leaf:
    return Leaf("$str", _take(fields, "$str", str), _take(fields, "type", str))


def _value(fields: Fields) -> Any:
    name, args = _take(fields, "$value", str), _take(fields, "args", list)
    return Leaf("$value", args, name) if _fixed.needs(name) else _fixed.make(name, args)


def _ndarray(fields: Fields) -> Leaf:
    return Leaf("$ndarray", _take(fields, "$ndarray", str), _numpy_dtype(fields, "dtype"))


def _scalar(fields: Fields) -> Leaf:
    data = base64.b64decode(_take(fields, "data", str), validate=True)
    dtype = _numpy_dtype(fields, "$scalar")
    if len(data) != _numpy.itemsize(dtype):
        raise ValueError("'$scalar' does not hold one element")
    return Leaf("$scalar", data, dtype)


def _numpy_dtype(fields: Fields, name: str) -> str:
    dtype: str = _take(fields, name, str)
    if _numpy.code_of(dtype) is None:
        raise ValueError(f"the numpy dtype {dtype!r} is not known")
    return dtype


_READERS: dict[str, Callable[[Fields], Any]] = {
    "$int": _int,
    "$float": _float,
    "$bytes": _bytes,
    "$tuple": _tuple,
    "$dict": _dict,
    "$odict": _odict,
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$set": _boxed_set("$set"),
    "$frozenset": _boxed_set("$frozenset"),
    "$dataclass": _boxed_fields("$dataclass"),
    "$namedtuple": _boxed_fields("$namedtuple"),
    "$namespace": _namespace,
    "$enum": _enum,
    "$str": _str,
    "$value": _value,
    "$counter": _counter,
    "$size": _size,
    "$dtype": _named("$dtype"),
    "$device": _named("$device"),
    "$tensor": _named("$tensor"),
    "$object": _named("$object"),
    "$pickle": _named("$pickle"),
    "$ndarray": _ndarray,
    "$scalar": _scalar,
}
