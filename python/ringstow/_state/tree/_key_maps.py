"""Joins and splits tensors between a checkpoint and a state dict: the values of ``rename=``.

A key of ``rename=`` is a name in the checkpoint, or a tuple of names; a ``*`` in it stands for one
step, such as an expert's number. Each object here says what becomes of these tensors, and ``to``
what becomes of the result: a name in the state dict, or a further object. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from ringstow._state.tree import _tensor_views as views
from ringstow._state.tree._tensor_views import CannotJoinError, View

__all__ = ["Concat", "KeyMap", "Split", "Stack", "Transpose", "Unstack"]

Stars = tuple[object, ...]
"""The steps for which the ``*`` of a pattern stand."""
Stream = dict[Stars, View]
"""The tensors of one pattern."""
ShapeOf = Callable[[str, Stars], "tuple[int, ...] | None"]
"""Returns the shape of the state dict's tensor of a pattern; None if it has none."""
Result = tuple[str, Stars, View]
"""A tensor for the state dict: a pattern of its name, and the steps of its ``*``."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Stack one tensor an expert into one tensor, along a new dimension.

    Takes the tensors of the last ``*`` of the key, in the order of its numbers, which must be 0, 1,
    2 and so on::

        rename={"experts.*.down_proj.weight": ringstow.Stack("experts.down_proj")}
    """

    to: str | KeyMap
    """The name in the state dict, or what follows."""
    dim: int = 0
    """The new dimension."""


@dataclasses.dataclass(frozen=True)
class Unstack:
    """Make one tensor of each index of a dimension; the inverse of `Stack`.

    ::

        rename={"experts.down_proj": ringstow.Unstack("experts.*.down_proj.weight")}
    """

    to: str | KeyMap
    """The names in the state dict, with a further ``*`` for the index; or what follows."""
    dim: int = 0
    """The dimension that goes."""


@dataclasses.dataclass(frozen=True)
class Concat:
    """Join tensors along a dimension: those of a key of several names, in their order.

    ::

        rename={("q.weight", "k.weight", "v.weight"): ringstow.Concat("qkv.weight")}

    With a key of one name, joins the tensors of its last ``*``.
    """

    to: str | KeyMap
    """The name in the state dict, or what follows."""
    dim: int = 0
    """The dimension along which they are joined."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Cut a tensor along a dimension; the inverse of `Concat`.

    ::

        rename={"qkv.weight": ringstow.Split(("q.weight", "k.weight", "v.weight"))}
    """

    to: Sequence[str | KeyMap]
    """The names in the state dict, or what follows, one for each part."""
    dim: int = 0
    """The dimension that is cut."""
    sizes: Sequence[int] | Literal["equal"] | None = None
    """The sizes of the parts, or ``"equal"``; None: the sizes of the tensors in the state dict.
    `ringstow.load` has none, and needs them here."""


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Swap two dimensions of a tensor.

    ::

        rename={"c_attn.weight": ringstow.Transpose("c_attn.weight")}
    """

    to: str | KeyMap
    """The name in the state dict, or what follows."""
    dims: tuple[int, int] = (0, 1)
    """The two dimensions."""


KeyMap: TypeAlias = Stack | Unstack | Concat | Split | Transpose


def check(to: object, names: int, stars: int) -> None:
    """Refuse a map that cannot be done for any tensors.

    Args:
        to: the name, or what becomes of the tensors.
        names: how many names the key has; 1 once they are joined.
        stars: how many ``*`` stand in each.

    Raises:
        TypeError: it is neither a name nor one of the objects here.
        ValueError: the numbers of names and ``*`` do not fit.
    """
    if isinstance(to, str):
        _check_name(to, names, stars)
    elif isinstance(to, Concat):
        if names == 1 and not stars:
            raise ValueError(f"{to} joins several names, or those of a *: its key has one name")
        check(to.to, 1, stars if names > 1 else stars - 1)
    elif isinstance(to, Stack):
        if not stars:
            raise ValueError(f"{to} stacks the tensors of a *, and its key has none")
        check(to.to, names, stars - 1)
    elif isinstance(to, Transpose):
        if len({*to.dims}) != 2:
            raise ValueError(f"{to} swaps two dimensions: dims= needs two different ones")
        check(to.to, names, stars)
    elif isinstance(to, Unstack | Split):
        if names > 1:
            raise ValueError(f"{to} takes one tensor: join the {names} names by Concat first")
        if isinstance(to, Unstack):
            return check(to.to, 1, stars + 1)
        if isinstance(to.to, str) or not to.to:
            raise ValueError(f"{to} needs a tuple of names, one for each part")
        if to.sizes not in (None, "equal") and len(to.sizes) != len(to.to):
            raise ValueError(f"{to} has {len(to.to)} names and {len(to.sizes)} sizes")
        for part in to.to:
            check(part, 1, stars)
    else:
        raise TypeError(
            'rename maps a name to a name, such as {"module": ""}, or to a Stack, Unstack, Concat, '
            f"Split or Transpose, not to {to!r:.60}"
        )


def _check_name(name: str, names: int, stars: int) -> None:
    if names > 1:
        raise ValueError(f"rename makes {name!r} of {names} names: join them by Concat or Stack")
    found = name.split(".").count("*")
    if found != stars:
        raise ValueError(
            f"rename maps to {name!r}, with {found} *, where {stars} are needed: one for each * "
            "that the key has and Stack or Concat does not take, and one for each Unstack"
        )


def taken_stars(to: str | KeyMap, names: int) -> int:
    """Return how many of the last ``*`` of a key of so many names a map joins over."""
    if isinstance(to, Stack):
        return 1 + taken_stars(to.to, names)
    if isinstance(to, Concat):
        return (names == 1) + taken_stars(to.to, 1)
    return taken_stars(to.to, names) if isinstance(to, Transpose) else 0


def run(to: str | KeyMap, streams: list[Stream], shape_of: ShapeOf | None) -> Iterator[Result]:
    """Yield the tensors that a map makes.

    Args:
        to: the map, which `check` has accepted.
        streams: the tensors of each name of the key.
        shape_of: looks into the state dict; None if there is none.

    Raises:
        CannotJoinError: tensors are missing, or do not fit together.
    """
    if isinstance(to, str):
        yield from ((to, stars, view) for stars, view in streams[0].items())
    elif isinstance(to, Stack):
        stacked = [_over_last(one, lambda found: views.stack(found, to.dim)) for one in streams]
        yield from run(to.to, stacked, shape_of)
    elif isinstance(to, Concat):
        yield from run(to.to, [_concat(streams, to.dim)], shape_of)
    elif isinstance(to, Transpose):
        turned = [
            {at: views.transpose(view, *to.dims) for at, view in one.items()} for one in streams
        ]
        yield from run(to.to, turned, shape_of)
    elif isinstance(to, Unstack):
        parts = {
            (*stars, str(number)): part
            for stars, view in streams[0].items()
            for number, part in enumerate(views.unstack(view, to.dim))
        }
        yield from run(to.to, [parts], shape_of)
    else:
        yield from _split(to, streams[0], shape_of)


def _split(to: Split, stream: Stream, shape_of: ShapeOf | None) -> Iterator[Result]:
    parts: list[Stream] = [{} for _ in to.to]
    for stars, view in stream.items():
        sizes = to.sizes
        if sizes is None:
            sizes = _sizes_here(to, stars, shape_of)
        if sizes == "equal":
            sizes = views.equal_sizes(view, to.dim, len(parts))
        cut = views.split(view, to.dim, sizes)
        for part, one in zip(parts, cut, strict=True):
            part[stars] = one
    for part, then in zip(parts, to.to, strict=True):
        yield from run(then, [part], shape_of)


def _sizes_here(to: Split, stars: Stars, shape_of: ShapeOf | None) -> list[int] | Literal["equal"]:
    """Return the sizes of the state dict's tensors.

    If it lacks some, or if more is done to them, the parts are equal: if that is wrong, they do not
    fit later.

    Raises:
        CannotJoinError: there is no state dict.
    """
    if shape_of is None:
        raise CannotJoinError(
            'Split needs sizes=, such as sizes="equal", where no state dict has the parts'
        )
    shapes = [shape_of(one, stars) if isinstance(one, str) else None for one in to.to]
    fits = (one for one in shapes if one is not None and -len(one) <= to.dim < len(one))
    sizes = [shape[to.dim] for shape in fits]
    return sizes if len(sizes) == len(shapes) else "equal"


def _concat(streams: list[Stream], dim: int) -> Stream:
    if len(streams) == 1:
        return _over_last(streams[0], lambda found: views.concat(found, dim))
    every = dict.fromkeys(stars for stream in streams for stars in stream)
    return {stars: views.concat([stream[stars] for stream in streams], dim) for stars in every}


def _over_last(stream: Stream, join: Callable[[list[View]], View]) -> Stream:
    """Join the tensors of the last ``*``, in the order of its numbers."""
    groups: dict[Stars, dict[int, View]] = {}
    for (*stars, last), view in stream.items():
        text = str(last)
        if not text.isdecimal():
            raise CannotJoinError(f"a * to join stands for a number, and here for {text!r}")
        groups.setdefault(tuple(stars), {})[int(text)] = view
    for group in groups.values():
        lacking = [number for number in range(max(group) + 1) if number not in group]
        if lacking:
            raise CannotJoinError(f"number {lacking[0]} of {max(group) + 1} is missing")
    return {stars: join([group[n] for n in sorted(group)]) for stars, group in groups.items()}
