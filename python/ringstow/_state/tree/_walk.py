"""Paths in a state dict, and walks over states and skeletons. Pure.

A skeleton is a state dict with a `Leaf` or `Box` for each value that has not been made yet.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from ringstow._native import Leaf as Leaf

# The tags whose body is the name of an entry of the manifest.
STORED = ("$tensor", "$ndarray", "$object")
# The tag of a tensor that is made of other tensors.
COMPOSITE = "$composite"
DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = (list, tuple, collections.deque)

Path = tuple[object, ...]
Make = Callable[[Any, Path], Any]


class Attribute(str):
    """A step of a path that is an attribute, not a key."""

    __slots__ = ()


METADATA = Attribute("_metadata")


def describe(path: Path) -> str:
    """Return a path as it would be written in Python: ``optimizer['state'][0]``."""
    if not path:
        return "the state dict"
    root, *rest = path
    text = root if isinstance(root, str) and root.isprintable() else f"[{root!r}]"
    for step in rest:
        text += f".{step}" if isinstance(step, Attribute) else f"[{step!r}]"
    return text


def flat_name(path: Path) -> str:
    """Return a path joined by dots: ``optimizer.state.0``."""
    return ".".join(step if isinstance(step, str) else repr(step) for step in path)


@dataclasses.dataclass(eq=False, slots=True)
class Box:
    """A container that can be made only after its items: a set, or a value with fields.

    ``tag`` is the tree's tag, such as ``"$set"``, ``"$dataclass"``; ``name`` is the type's name.
    """

    tag: str
    name: str
    items: list[Any] | dict[str, Any]
    """A set's items in a list; all other items by the field's name."""
    unmade: Box | None = None
    """The box of the skeleton, if these items were made from its items."""
    context: dict[str, Any] | None = None
    """The skeleton of the values that a composite tensor has beside its items; see `COMPOSITE`."""

    def __repr__(self) -> str:
        """Return the text of a box in a flat name, if it is a dict's key."""
        return f"<{self.tag[1:]}>"

    def steps(self) -> list[tuple[Any, Any]]:
        """Return the (step of the path, item) pairs."""
        if isinstance(self.items, dict):
            return [(Attribute(name), item) for name, item in self.items.items()]
        return list(enumerate(self.items))


def children(node: object) -> Iterator[tuple[Any, Any]] | None:
    """Return the (key or index, child) pairs of a container; None for other values."""
    if isinstance(node, dict) and node:
        return iter(node.items())
    if isinstance(node, (list, tuple, collections.deque)) and node:
        return iter(enumerate(node))
    if type(node) is Box and node.items:
        return iter(node.steps())
    return None


def leaves(node: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything except containers; an empty container is a leaf too."""
    pairs = children(node)
    if pairs is None:
        yield path, node
        return
    for key, child in pairs:
        yield from leaves(child, (*path, key))


def rebuild(node: Any, path: Path, make: Make, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a copy of a state or skeleton with ``make(leaf, path)`` in place of each leaf.

    Leaves are every `Leaf`, every `Box`, and all values for which ``is_leaf`` is true. ``make``
    gets a box with the made items.
    """
    kind = type(node)
    if kind is Leaf or (is_leaf is not None and kind is not Box and is_leaf(node)):
        return make(node, path)
    if kind in DICTS:
        return _rebuild_dict(node, path, make, is_leaf)
    if kind in _LISTS or kind is Box:
        # A loop, not a comprehension, which would add a frame per level.
        items = []
        for step, child in enumerate(node) if kind in _LISTS else node.steps():
            items.append(rebuild(child, (*path, step), make, is_leaf))
        if kind is Box:
            return make(with_items(node, items), path)
        return items if kind is list else like(node, items)
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
        named = dict(zip(box.items, items, strict=True))
        return Box(box.tag, box.name, named, box, box.context)
    return Box(box.tag, box.name, items, box)


class NoKeyError(ValueError):
    """A dict's key in a skeleton is invalid."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"has a key that {why}")
        self.path = path


SAME_HASH_MAX = 100


def check_hashes(keys: Iterable[Any]) -> None:
    """Refuse keys that a file has chosen to have equal hashes: a dict of them is quadratic.

    Raises:
        ValueError: too many keys have the same hash. TypeError: a key is not hashable.
    """
    if max(collections.Counter(map(hash, keys)).values(), default=0) > SAME_HASH_MAX:
        raise ValueError(f"more than {SAME_HASH_MAX} of its keys have the same hash")


def rebuild_key(key: Any, path: Path, make: Make, others: Container[Any]) -> Any:
    """Return the key of the state's dict that a skeleton's key becomes.

    Raises:
        NoKeyError: the key is invalid, or a duplicate.
    """
    made = rebuild(key, (*path, "<key>"), make) if type(key) in (Leaf, tuple, Box) else key
    try:
        is_twice = made in others
    except TypeError as error:
        raise NoKeyError(path, f"cannot be one: {error}") from None
    if is_twice:
        raise NoKeyError(path, f"is there twice: {made!r:.80}")
    return made


def _rebuild_dict(
    node: dict[Any, Any], path: Path, make: Make, is_leaf: Callable[[Any], bool] | None
) -> Any:
    result: dict[Any, Any] = like(node, ())
    hashes: collections.Counter[int] = collections.Counter()
    for key, child in node.items():
        at = (*path, key)
        made = key if type(key) is str else rebuild_key(key, path, make, result)
        if type(key) in (Leaf, Box):
            hashes[hash(made)] += 1
            if hashes[hash(made)] > SAME_HASH_MAX:
                raise NoKeyError(path, "has the hash of too many others")
        result[made] = make(child, at) if type(child) is Leaf else rebuild(child, at, make, is_leaf)
    metadata = metadata_of(node)
    if metadata is not None:
        value = rebuild(metadata, (*path, METADATA), make, is_leaf)
        result._metadata = value  # type: ignore[attr-defined]
    return result


def leaf_name(path: Path, node: object) -> str:
    """Return the flat name of a leaf.

    Its tensor is stored under this name, unless another leaf shares its memory; then under the
    other leaf's name.
    """
    name = flat_name(path)
    if isinstance(node, Leaf) and node.tag in STORED:
        stored: str = node.body
        if stored.startswith(f"{name}#"):
            return stored
    return name


def nodes(node: Any, path: Path = ()) -> list[tuple[Path, Leaf | Box]]:
    """Return every leaf and box of a skeleton with its path, also in keys and metadata."""
    found: list[tuple[Path, Leaf | Box]] = []

    def note(leaf: Leaf | Box, at: Path) -> Leaf | Box:
        found.append((at, leaf))
        return leaf

    rebuild(node, path, note)
    return found


def stored_in(node: Any) -> list[str]:
    """Return the names of the tensors and objects that a skeleton refers to, each once."""
    return list(dict.fromkeys(leaf.body for leaf in stored_leaves(node)))


def stored_leaves(node: Any) -> list[Leaf]:
    """Return the leaves of a skeleton that refer to tensors and objects."""
    found = (leaf for _, leaf in nodes(node))
    return [leaf for leaf in found if isinstance(leaf, Leaf) and leaf.tag in STORED]


def find(node: Any, name: str, path: Path = ()) -> tuple[Path, Any] | None:
    """Return the path and node of a name, a path joined by dots; None if there is none."""
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
    """Return the ``_metadata`` of an OrderedDict; None if it has none."""
    return getattr(node, "_metadata", None) if isinstance(node, collections.OrderedDict) else None
