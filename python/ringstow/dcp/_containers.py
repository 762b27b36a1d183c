"""Keeps what DCP's flat names lose: types of mappings, non-text keys, empty containers.

DCP flattens every mapping and writes its keys as text. So each rank notes the mappings that are not
a plain dict with text keys, and the coordinator's tree restores them. Pure.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ringstow._state.tree import _custom_types, _encode
from ringstow._state.tree._dcp_containers import number_of
from ringstow._state.tree._encode import Json
from ringstow._state.tree._refusals import Refusals, Refused, type_name
from ringstow._state.tree._walk import METADATA, metadata_of

Step = str | int
Path = tuple[Step, ...]
Tag = Literal["$dict", "$odict", "$defaultdict", "$counter", "list"]

_TAGS: dict[type, Tag] = {
    dict: "$dict",
    collections.OrderedDict: "$odict",
    collections.defaultdict: "$defaultdict",
    collections.Counter: "$counter",
}
# JSON stores these types unchanged.
_INT_MAX = 1 << 53

_log = logging.getLogger("ringstow")
_warned: set[str] = set()


class Container(NamedTuple):
    """The information that flat names lose of one mapping, or of a list of empty mappings."""

    tag: Tag
    position: int | None
    """The position among the items around it; None if a flat name leads to it."""
    keys: dict[str, Json] | Literal["text", "ints"] = "text"
    """The tree of each key by its text; or the type of all keys."""
    rest: Any = None
    """A Counter's pairs, a defaultdict's factory, an OrderedDict's ``_metadata``."""

    def tree(self, items: Mapping[str, Json]) -> Json:
        """Return the tree of the mapping, whose items have their keys as text."""
        if self.tag == "$counter":
            return {"$counter": self.rest}
        pairs: list[Any] = [[self._key(text), item] for text, item in items.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key, _ in pairs)
        body: Any = dict(pairs) if is_plain else pairs
        if self.tag == "$odict":
            attributes = {} if self.rest is None else {"attrs": {str(METADATA): self.rest}}
            return {"$odict": body, **attributes}
        if self.tag == "$defaultdict":
            return {"$defaultdict": body, "factory": self.rest}
        return body if is_plain else {"$dict": body}

    def _key(self, text: str) -> Json:
        if self.keys == "ints":
            number = number_of(text)
            return text if number is None else number  # another rank's
        return self.keys.get(text, text) if isinstance(self.keys, dict) else text


Containers = dict[Path, Container]


def containers_of(state: Mapping[Any, Any], *, with_metadata: bool) -> Containers:
    """Return the notes of a state, by DCP's paths.

    Args:
        state: the state.
        with_metadata: note OrderedDicts' ``_metadata``, which is long.
    """
    look = _Look(with_metadata)
    look.mapping(state, (), None)
    if look.others:
        _warn(look.others)
    return look.notes


def joined(notes: Iterable[Containers]) -> Containers:
    """Return the notes of all ranks; if several have a note, the first rank's, with all keys."""
    whole: Containers = {}
    for some in notes:
        for path, note in some.items():
            whole[path] = _both(whole[path], note) if path in whole else note
    return whole


def _both(note: Container, other: Container) -> Container:
    if note.tag != other.tag:
        return note
    if note.tag == "$counter":
        known = [key for key, _ in note.rest]
        note = note._replace(rest=[*note.rest, *(p for p in other.rest if p[0] not in known)])
    elif note.rest is None:
        note = note._replace(rest=other.rest)
    if isinstance(note.keys, dict) and isinstance(other.keys, dict):
        note = note._replace(keys={**other.keys, **note.keys})
    return note


# Whether DCP may flatten a value of a type.
_is_container: Callable[[Any], bool] = functools.lru_cache(maxsize=1024)(
    lambda kind: issubclass(kind, Mapping | list)
)


def _is_usual(item: Any) -> bool:
    """Return, quickly, whether an item is a dict with text keys and no container in it."""
    if type(item) is not dict or not item or {*map(type, item)} != {str}:
        return False
    return not any(map(_is_container, {*map(type, item.values())}))


class _Look:
    """One walk over a state, as DCP walks it."""

    def __init__(self, with_metadata: bool) -> None:
        self.notes: Containers = {}
        self.others: list[tuple[Path, Any]] = []
        """The mappings that load as a dict, or with text keys."""
        self._with_metadata = with_metadata

    def mapping(self, node: Mapping[Any, Any], path: Path, position: int | None) -> bool:
        """Note a mapping and its items; return whether DCP has a flat name in it.

        Args:
            node: the mapping.
            path: the mapping's path.
            position: its position among the items around it.
        """
        kinds = {*map(type, node.values())}
        containers = [kind for kind in kinds if _is_container(kind)]
        is_named = len(containers) < len(kinds)
        if containers:
            for number, (key, item) in enumerate(node.items()):
                if _is_usual(item):
                    is_named = True
                elif _is_container(type(item)):
                    is_named |= self._item(item, (*path, str(key)), number)
        note = self._note(node, path, None if is_named else position)
        if note is not None:
            self.notes[path] = note
        return is_named

    def _item(self, item: Any, path: Path, position: int) -> bool:
        if isinstance(item, Mapping):
            return self.mapping(item, path, position)
        is_named = not item  # an empty list is a value
        for number, child in enumerate(item):
            is_container = _is_container(type(child))
            is_named |= self._item(child, (*path, number), number) if is_container else True
        if not is_named:
            self.notes[path] = Container("list", position)
        return is_named

    def _note(self, node: Mapping[Any, Any], path: Path, position: int | None) -> Container | None:
        kind = type(node)
        tag = _TAGS.get(kind)
        keys = self._keys(node, path)
        if tag == "$dict" and keys == "text" and position is None:
            return None
        rest: Any = None
        if tag == "$counter":
            rest = _tree(node)
            rest, tag = (None, None) if rest is None else (rest["$counter"], tag)
        elif tag == "$defaultdict":
            try:
                rest = _custom_types.factory_of(node)  # type: ignore[arg-type]
            except Refused:
                tag = None
        elif tag == "$odict" and self._with_metadata:
            metadata = metadata_of(node)
            rest = None if metadata is None else _tree(metadata)
        if tag is None:
            self.others.append((path, node))
        return Container(tag or "$dict", position, keys, rest if tag else None)

    def _keys(
        self, node: Mapping[Any, Any], path: Path
    ) -> dict[str, Json] | Literal["text", "ints"]:
        kinds = {*map(type, node)}
        if kinds <= {str}:
            return "text"
        if kinds == {int} and min(node) > -_INT_MAX and max(node) < _INT_MAX:
            return "ints"
        trees = _tree([*node])
        if not isinstance(trees, list):
            self.others.append((path, node))
            return "text"
        return {str(key): tree for key, tree in zip(node, trees, strict=True)}


def _tree(value: Any) -> Any:
    """Return the tree of a value without tensors; None if it has no tree."""
    refusals = Refusals()
    encoded = _encode.encode({"": value}, refusals=refusals, fast=False)
    if refusals or len(encoded.tensors):
        return None
    return json.loads(encoded.tree)[""]


def _warn(others: list[tuple[Path, Any]]) -> None:
    """Warn, once for each type, of mappings that the tree cannot represent."""
    new = {type_name(node): path for path, node in others if type_name(node) not in _warned}
    _warned.update(new)
    if new:
        listed = ", ".join(f"{'.'.join(map(str, path))} ({name})" for name, path in new.items())
        _log.warning(
            "DCP takes mappings apart, and ringstow.load returns these as dicts, with text for "
            "other keys: %s. Save dict(x), or load by dcp.load, which keeps what the state has",
            listed,
        )
