"""Converts values of the program's own types to the type's name and fields, and back.

Pure. No file can run code this way. A type is searched only in modules that the program has
imported, it must be of the kind in the file, and none of its methods is called: a dataclass gets
its fields without ``__init__``, an Enum returns its member, a named tuple gets its items.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringstow._core._errors import UnsupportedError
from ringstow._state.tree._refusals import Refused
from ringstow._state.tree._walk import Box, children

# The allowed default factories of a defaultdict, by name.
FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes, bytearray,
        collections.OrderedDict, collections.Counter, collections.deque,
    )
}  # fmt: skip
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_NOT_FOUND = "of a type that can't be found by its name, {name}"


def reference(kind: type) -> str:
    """Return the reference of a type for `resolve`: ``"module:Outer.Inner"``.

    Raises:
        Refused: `resolve` would not find this type.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        reason = _NOT_FOUND.format(name=name.replace(":", "."))
        raise Refused("its fields as a dict, or define the type at a module's top level", reason)
    if _has_finalizer(kind):
        raise Refused("its fields as a dict", "whose type has a __del__")
    return name


def resolve(tag: str, name: str, key: str) -> type:
    """Return the type of a reference; nothing is imported for it.

    Args:
        tag: the kind of type that it must be: ``"$dataclass"``, ``"$namedtuple"``, ``"$enum"`` or
            ``"$str"``.
        name: the reference.
        key: the value's path, for the message.

    Raises:
        UnsupportedError: the type is missing, or is of another kind.
    """
    module, _, path = name.partition(":")
    shown = name.replace(":", ".")
    found = _find(name)
    if found is None:
        remedy = f"import {module} first"
        if module in sys.modules:
            remedy = f"{module} is imported and has no {path}: define it there"
        raise UnsupportedError(
            f"{key} is a {shown}, a type that is not imported here; {remedy}, or load the rest "
            "with prefix= or keys= of ringstow.load"
        )
    what, is_of_kind = _KINDS[tag]
    if not is_of_kind(found) or _has_finalizer(found):
        raise UnsupportedError(
            f"{key} is a {shown}, which is no {what} here as it was when it was saved; load the "
            "rest with prefix= or keys= of ringstow.load"
        )
    return found


def _find(name: str) -> type | None:
    """Return a type that is defined in an imported module, or in a type of such a module."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        # Not getattr: that runs a module's __getattr__, or a metaclass's.
        found = getattr(found, "__dict__", {}).get(step)
    return found if isinstance(found, type) else None


def _has_finalizer(kind: type) -> bool:
    """Return whether a type runs code when a value of it is freed."""
    return any("__del__" in vars(base) for base in kind.__mro__)


def _is_named_tuple(kind: type) -> bool:
    names = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and isinstance(names, tuple)
        and all(type(name) is str for name in names)
        and len(set(names)) == len(names)
    )


_KINDS: dict[str, tuple[str, Callable[[type], bool]]] = {
    "$dataclass": ("dataclass", dataclasses.is_dataclass),
    "$namedtuple": ("named tuple", _is_named_tuple),
    "$enum": ("Enum", lambda kind: issubclass(kind, enum.Enum)),
    "$str": ("sub-class of str", lambda kind: issubclass(kind, str)),
}


# Values with fields.


def fields_of(value: Any) -> Box | None:
    """Return the fields of a value with named fields; None for a value of any other type.

    Raises:
        Refused: the fields are not its whole state.
    """
    kind, tag = type(value), _tag_of(value)
    if tag == "$namespace":
        return Box(tag, _name_of(kind), _plain_names(vars(value)))
    if tag == "$dataclass":
        return Box(tag, reference(kind), _dataclass_fields(value, kind))
    if tag == "$namedtuple":
        items = tuple(tuple.__iter__(value))
        if len(items) != len(kind._fields) or getattr(value, "__dict__", None):
            raise Refused("tuple(x)", "which has more to it than its fields")
        return Box(tag, reference(kind), dict(zip(kind._fields, items, strict=True)))
    return None


def has_fields(value: object) -> bool:
    """Return whether `fields_of` supports the value's type, ignoring extra attributes."""
    return _tag_of(value) is not None


def _tag_of(value: object) -> str | None:
    kind = type(value)
    if isinstance(value, tuple):
        return "$namedtuple" if kind is not tuple and _is_named_tuple(kind) else None
    name = _name_of(kind)
    if name in NAMESPACES and _namespace_type(name) is kind:
        return "$namespace"
    is_dataclass = dataclasses.is_dataclass(kind) and not isinstance(value, enum.Enum)
    return "$dataclass" if is_dataclass else None


def parts(node: object) -> Iterator[tuple[Any, Any]] | None:
    """Return the result of `children`, and the fields of a dataclass, named tuple or namespace.

    A value whose fields are not its whole state has no parts.
    """
    pairs = children(node)
    if pairs is None:
        box = _taken_apart(node)
        return None if box is None else iter(box.steps())
    return pairs


def is_frozen(value: object) -> bool:
    """Return whether a value with fields is replaced when one of them changes."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return isinstance(value, tuple) or bool(getattr(parameters, "frozen", False))


def items_of(value: object) -> list[Any]:
    """Return the values of the fields of a value; empty without fields."""
    box = _taken_apart(value)
    return [] if box is None else [item for _, item in box.steps()]


def _taken_apart(value: object) -> Box | None:
    try:
        return fields_of(value)
    except Refused:
        return None


def with_fields(box: Box, key: str) -> Any:
    """Return the value made from the fields that `fields_of` returned.

    Raises:
        UnsupportedError: its type is missing, or has other fields now.
    """
    assert isinstance(box.items, dict)
    fields, name = box.items, box.name
    if box.tag == "$namespace":
        value: Any = _namespace_type(name)()
        vars(value).update(fields)
        return value
    kind = check_fields(box, key)
    if box.tag == "$namedtuple":
        return tuple.__new__(kind, [fields[field] for field in kind._fields])
    value = _new(kind)
    for field in dataclasses.fields(kind):
        if field.name in fields:
            set_field(value, field.name, fields[field.name])
        # A field added to the type since gets its default, as if the constructor had been called.
        elif field.init and field.default_factory is not dataclasses.MISSING:
            set_field(value, field.name, field.default_factory())
    return value


def check_fields(box: Box, key: str) -> Any:
    """Return the type of a box with fields, or raise what `with_fields` would raise."""
    if box.tag == "$namespace":
        return _namespace_type(box.name)
    kind: Any = resolve(box.tag, box.name, key)
    if box.tag == "$namedtuple":
        known = needed = list(kind._fields)
    else:
        fields = dataclasses.fields(kind)
        known = [field.name for field in fields]
        needed = [field.name for field in fields if field.init and not _has_default(field)]
    _check_fields(known, box.items, needed, box.name, key)
    return kind


def set_field(value: Any, name: str, item: object) -> None:
    """Set a field of a dataclass or of a namespace, frozen ones too, without code of its type."""
    for base in type(value).__mro__:
        slot = vars(base).get(name)
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(value, item)
            return
    vars(value)[name] = item


def _dataclass_fields(value: Any, kind: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    there = held(value)
    cached = {name for name in there if _is_cached(kind, name)}
    extra = sorted(there.keys() - set(names) - cached)
    remedy = "dataclasses.asdict(x)"
    if extra:
        raise Refused(remedy, f"which has an attribute beside its fields, {extra[0]!r}")
    try:
        _new(kind)
    except TypeError:  # it derives from dict, or from an exception
        raise Refused(remedy, "which is more than a dataclass") from None
    return _plain_names({name: there[name] for name in names if name in there})


def held(value: Any) -> dict[str, Any]:
    """Return all attributes of an instance, in its dict and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and name not in found:
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # never set
                    continue
    return found


def _is_cached(kind: type, name: str) -> bool:
    """Return whether an attribute is the cached result of a cached property."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return type(found).__name__ == "cached_property"


def _new(kind: Any) -> Any:
    return object.__new__(kind)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    nothing = dataclasses.MISSING
    return field.default is not nothing or field.default_factory is not nothing


def _check_fields(
    known: Iterable[str], given: Iterable[str], needed: Iterable[str], name: str, key: str
) -> None:
    unknown = [field for field in given if field not in set(known)]
    missing = [field for field in needed if field not in set(given)]
    if unknown or missing:
        what = f"has no field {unknown[0]!r}" if unknown else f"has a new field {missing[0]!r}"
        raise UnsupportedError(
            f"{key} was saved as a {name.replace(':', '.')} with other fields: the type here "
            f"{what}; load the rest with prefix= or keys= of ringstow.load"
        )


def _plain_names(fields: dict[Any, Any]) -> dict[str, Any]:
    odd = [name for name in fields if type(name) is not str or name.startswith("$")]
    if odd:
        raise Refused("vars(x)", f"which has an attribute called {odd[0]!r}")
    return dict(fields)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _namespace_type(name: str) -> Any:
    if name == "types.SimpleNamespace":
        return types.SimpleNamespace
    import argparse  # slow import, rarely needed

    return argparse.Namespace


# Values that are names or text.


def member_of(value: enum.Enum) -> dict[str, Any]:
    """Return an Enum's member by name; combined flags without a name by number.

    Raises:
        Refused: neither identifies the member.
    """
    kind = type(value)
    name = reference(kind)
    if kind._member_map_.get(value._name_ or "") is value:
        return {"$enum": name, "name": value._name_}
    if isinstance(value, enum.Flag) and type(value._value_) is int:
        return {"$enum": name, "value": value._value_}
    raise Refused("x.value", "which is no member of its Enum")


def member_at(name: str, member: str | int, key: str) -> Any:
    """Return a member of an Enum by its name, or by the number of its flags.

    Raises:
        UnsupportedError: the type is missing, or has no such member.
    """
    kind: Any = resolve("$enum", name, key)
    try:
        if type(member) is str:
            return kind._member_map_[member]
        if issubclass(kind, enum.Flag):
            return kind(member)
    except (KeyError, ValueError):
        pass
    raise UnsupportedError(
        f"{key} is {name.replace(':', '.')}.{member}, a member that the Enum here has not; load "
        "the rest with prefix= or keys= of ringstow.load"
    )


def text_of(value: str) -> dict[str, Any]:
    """Return a str of a sub-class by the type's name.

    Raises:
        Refused: it has attributes of its own, or the type can't be found by its name.
    """
    if held(value):
        raise Refused("str(x)", "which has attributes beside its text")
    try:
        name = reference(type(value))
    except Refused as refused:
        raise Refused("str(x)", refused.reason) from None
    return {"$str": str.__str__(value), "type": name}


def text_as(name: str, text: str, key: str) -> str:
    """Return a text as a value of a sub-class of str.

    Raises:
        UnsupportedError: the type is missing.
    """
    return str.__new__(resolve("$str", name, key), text)


def factory_of(value: collections.defaultdict[Any, Any]) -> str | None:
    """Return the name of a defaultdict's factory; None without a factory.

    Raises:
        Refused: the factory is not one of the known types.
    """
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise Refused("dict(x)", "whose default_factory is no plain type")
    return str(name)
