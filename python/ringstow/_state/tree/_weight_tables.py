"""Reads transformers' tables of weight conversions as maps of names: ``WeightRenaming`` and others.

Names are mapped by the transforms' own public method. What their operations do to tensors is done
here to views, so that a load reads each byte straight to its place. Pure.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from ringstow._core._errors import UnsupportedError
from ringstow._state.tree import _tensor_views as views
from ringstow._state.tree._named_leaves import Named, Steps, Tensors, view_of
from ringstow._state.tree._tensor_views import CannotJoinError, View

Collected = dict[str, list[View]]
"""Tensors by the pattern of their names."""


def is_transform(value: Any) -> bool:
    """Return whether a value is an entry of a table."""
    return callable(getattr(value, "rename_source_key", None)) and hasattr(value, "target_patterns")


class _Group(NamedTuple):
    """The tensors that one converter makes into others."""

    converter: Any
    found: dict[str, list[tuple[Named, View]]]


class Table:
    """A list of transforms, applied as transformers does: all renamings, then one converter."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        transforms = copy.deepcopy(list(transforms))  # they note that they were used
        self._renamings = [one for one in transforms if not hasattr(one, "operations")]
        self._converters = [one for one in transforms if hasattr(one, "operations")]
        self.joins = bool(self._converters)

    def there(self, steps: Steps) -> Steps:
        name = _text(steps)
        renamed = self._renamed(name)
        return steps if renamed == name else tuple(renamed.split("."))

    def here(self, steps: Steps) -> Steps:
        return steps

    def takes(self, steps: Steps) -> bool:
        return self._converted(self._renamed(_text(steps)))[1] is not None

    def join_of(self, steps: Steps) -> Hashable:
        return self._converted(self._renamed(_text(steps)))[0]

    def idle(self) -> list[str]:
        return []  # a table has entries for other models, too

    def apply(self, leaves: list[Named], tensors: Tensors) -> Iterator[Named]:
        groups: dict[str, _Group] = {}
        plain: list[Named] = []
        for one in sorted(leaves, key=lambda one: _natural(_text(one.steps))):
            name = _text(one.steps)
            renamed, converter, pattern = self._converted(self._renamed(name))
            if tensors.shape(renamed) is None and tensors.shape(name) is not None:
                renamed, converter = name, None
            if not one.may_join:
                converter = None
            view = None if converter is None else view_of(one, tensors)
            if view is None:
                is_same = renamed == name
                plain.append(one if is_same else one._replace(steps=tuple(renamed.split("."))))
                continue
            group = groups.setdefault(renamed, _Group(converter, {}))
            group.found.setdefault(pattern, []).append((one, view))
        yield from plain
        for layer, group in groups.items():
            yield from _made(layer, group, tensors)

    def _renamed(self, name: str) -> str:
        for one in self._renamings:
            name = one.rename_source_key(name)[0]
        return name

    def _converted(self, name: str) -> tuple[str, Any, str]:
        """Return the new name, the converter, and the pattern of it that fits."""
        for one in self._converters:
            renamed, pattern = one.rename_source_key(name)
            if pattern is not None:
                return renamed, one, pattern
        return name, None, ""


def _text(steps: Steps) -> str:
    return ".".join(map(str, steps))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers by their values."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _made(layer: str, group: _Group, tensors: Tensors) -> Iterator[Named]:
    """Yield the tensors that a converter makes; ``layer`` is the first new name."""
    converter = group.converter
    collected = {pattern: [view for _, view in found] for pattern, found in group.found.items()}
    first = next(iter(group.found.values()))[0][0]
    what = _What(converter.source_patterns, converter.target_patterns, layer, tensors)
    try:
        for operation in converter.operations:
            kind = type(operation).__name__
            if kind not in _OPERATIONS or getattr(operation, "num_shards_attribute", None):
                raise UnsupportedError(
                    f"rename= cannot do {operation!r}, which the table has for {layer}: load the "
                    "model by from_pretrained, or give a table without it"
                )
            collected = _OPERATIONS[kind](operation, collected, what)
    except CannotJoinError as error:
        raise CannotJoinError(f"cannot make {layer}: {error}") from None
    full = layer.replace("*.", "0.")
    around = next((full.partition(name) for name in collected if name in full), None)
    for name, found in collected.items():
        text = name if around is None else around[0] + name + around[2]
        yield first._replace(steps=tuple(text.split(".")), node=found[0])


class _What(NamedTuple):
    """What an operation may look at."""

    sources: list[str]
    targets: list[str]
    layer: str
    tensors: Tensors

    def only_target(self) -> str:
        if len(self.targets) != 1:
            raise CannotJoinError(f"there are {len(self.targets)} names for one tensor")
        return self.targets[0]

    def name_of(self, pattern: str, collected: Collected) -> str:
        """Return the new name of the tensors of a pattern."""
        return self.only_target() if len(collected) == 1 else pattern


def _only(collected: Collected) -> View:
    found = [view for lot in collected.values() for view in lot]
    if len(found) != 1:
        raise CannotJoinError(f"one tensor was expected, and there are {len(found)}")
    return found[0]


def _merge(operation: Any, collected: Collected, what: _What) -> Collected:
    return {
        what.name_of(pattern, collected): [views.stack(found, operation.dim)]
        for pattern, found in collected.items()
    }


def _unmerge(operation: Any, collected: Collected, what: _What) -> Collected:
    made: Collected = {}
    for pattern, found in collected.items():
        name = what.name_of(pattern, collected)
        for number, view in enumerate(views.unstack(found[0], operation.dim)):
            made[name.replace("*", str(number))] = [view]
    return made


def _concat(operation: Any, collected: Collected, what: _What) -> Collected:
    lacking = [pattern for pattern in what.sources if pattern not in collected]
    if lacking:
        raise CannotJoinError(f"the checkpoint has no {lacking[0]}")
    every = [view for pattern in what.sources for view in collected[pattern]]
    return {what.only_target(): [views.concat(every, operation.dim)]}


def _chunk(operation: Any, collected: Collected, what: _What) -> Collected:
    view = _only(collected)
    sizes = views.equal_sizes(view, operation.dim, len(what.targets))
    return _cut(operation, view, sizes, what)


def _split(operation: Any, collected: Collected, what: _What) -> Collected:
    view = _only(collected)
    names = [what.layer.replace(what.targets[0], target) for target in what.targets]
    shapes = [what.tensors.shape(name) for name in names]
    if None in shapes:
        raise CannotJoinError(f"the state dict has no {names[shapes.index(None)]}")
    sizes = [shape[operation.dim] for shape in shapes if shape is not None]
    return _cut(operation, view, sizes, what)


def _cut(operation: Any, view: View, sizes: Sequence[int], what: _What) -> Collected:
    parts = views.split(view, operation.dim, sizes)
    return {name: [part] for name, part in zip(what.targets, parts, strict=True)}


def _transpose(operation: Any, collected: Collected, what: _What) -> Collected:
    view = _only(collected)
    name = what.targets[0] if len(what.targets) == 1 else what.sources[0]
    if operation.check_dims and view.shape == what.tensors.shape(what.layer):
        return {name: [view]}
    return {name: [views.transpose(view, operation.dim0, operation.dim1)]}


def _interleave(operation: Any, collected: Collected, what: _What) -> Collected:
    view = _only(collected)
    half = views.equal_sizes(view, operation.dim, 2)[0]
    if operation.inverse:
        order = [n // 2 + (n % 2) * half for n in range(2 * half)]
    else:
        order = [2 * (n % half) + n // half for n in range(2 * half)]
    return {what.targets[0]: [views.reorder(view, operation.dim, order)]}


_OPERATIONS: dict[str, Callable[[Any, Collected, _What], Collected]] = {
    "MergeModulelist": _merge,
    "SplitModulelist": _unmerge,
    "Concatenate": _concat,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
}
