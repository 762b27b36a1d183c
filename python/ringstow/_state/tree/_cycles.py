"""Handles values that refer back to themselves: visits each object once, and names cycles.

Pure. Code that walks objects of the program's own types uses `reached`. Code that copies a state
container by container, which would not end on a cycle, first calls `count`, or reports a
RecursionError by `naming_cycles`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _custom_types
from ringstow._state.tree._walk import METADATA, Path, describe, metadata_of

_ATOMS = (type(None), bool, int, float, str, bytes)
_DEPTH_MAX = _native.DEPTH_MAX


class NestingError(ValueError):
    """A container contains itself, or is nested too deep; the message says which.

    ``remedy`` completes "save it".
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def reached(node: object, inside: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield a value and everything reachable from it, each object once, without plain scalars.

    Args:
        node: the value.
        inside: returns the values inside a value.
    """
    seen: dict[int, object] = {}  # keeps them alive: no other object gets the same id
    pending = [node]
    while pending:
        one = pending.pop()
        if type(one) in _ATOMS or id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        pending.extend(inside(one))


def count(node: object, path: Path = ()) -> int:
    """Return how many values a walk over a state visits, counting shared ones at each visit.

    Takes time per object, not per visit: a list of two references to a list of two references, and
    so on, has too many visits for any walk.

    Raises:
        NestingError: a container contains itself, or is nested too deep.
    """
    counts: dict[int, int] = {}
    held: list[object] = []  # keeps them alive: no other object gets the same id
    inside = {id(node)}
    stack = [_Level(node, path)]
    while True:
        level = stack[-1]
        for step, child in level.pairs:
            if id(child) in inside:
                problem = f"{describe((*level.path, step))} contains itself"
                raise NestingError(problem, "without that reference")
            known = 1 if type(child) in _ATOMS else counts.get(id(child))
            if known is None:
                if len(stack) > _DEPTH_MAX:
                    begin = describe(level.path[:4])
                    problem = f"{begin}... is nested more than {_DEPTH_MAX} levels deep"
                    raise NestingError(problem, "flat")
                inside.add(id(child))
                stack.append(_Level(child, (*level.path, step)))
                break
            level.count += known
        else:
            stack.pop()
            inside.remove(id(level.node))
            held.append(level.node)
            counts[id(level.node)] = level.count
            if not stack:
                return level.count
            stack[-1].count += level.count


class _Level:
    """A container on the way down, and how far its items have been counted."""

    def __init__(self, node: object, path: Path) -> None:
        self.node = node
        self.path = path
        self.pairs = _pairs(node)
        self.count = 1


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the steps and items of containers that saves walk, and of mappings, as DCP does."""
    if type(node) is LazyTensor:
        return
    yield from _custom_types.parts(node) or ()
    if isinstance(node, Mapping) and not isinstance(node, dict):
        yield from node.items()
    if (metadata := metadata_of(node)) is not None:
        yield METADATA, metadata


@contextlib.contextmanager
def naming_cycles(state: object) -> Iterator[None]:
    """Report the RecursionError of a walk over a state as an error that names the key.

    Raises:
        InvalidStateError: a container contains itself, or is nested too deep.
    """
    try:
        yield
    except RecursionError:
        try:
            count(state)
        except NestingError as error:
            raise InvalidStateError(f"{error}: save it {error.remedy}") from None
        raise
