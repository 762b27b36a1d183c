"""Tensors that are made of parts of stored tensors: joined, cut and turned, without a copy. Pure.

A `View` says for each of its boxes where the elements are stored. A load reads these straight to
where they belong: nothing is joined in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a view, and the box of a stored tensor that it is."""

    offsets: Shape
    """Where the box begins in the view."""
    sizes: Shape
    source: str
    """The stored tensor."""
    start: Shape
    """Where the box begins in the stored tensor."""
    dims: tuple[int, ...]
    """The view's dimension for each of the stored tensor; -1: the box has one element there."""


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor of pieces that cover it."""

    dtype: str
    """safetensors' name of the element type."""
    array: str
    """numpy's dtype string, if arrays were saved."""
    shape: Shape
    pieces: tuple[Piece, ...]

    def like(self, shape: Shape, pieces: Iterable[Piece]) -> View:
        """Return a view of the same elements' type."""
        return View(self.dtype, self.array, shape, tuple(pieces))

    @property
    def kind(self) -> str:
        """The dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)}"


class CannotJoinError(ValueError):
    """Tensors do not fit together."""


def whole(name: str, dtype: str, array: str, shape: Shape) -> View:
    """Return a stored tensor as a view."""
    origin = (0,) * len(shape)
    return View(
        dtype, array, shape, (Piece(origin, shape, name, origin, tuple(range(len(shape)))),)
    )


def stack(views: Sequence[View], dim: int) -> View:
    """Return equal tensors along a new dimension.

    Raises:
        CannotJoinError: they differ, or there is no such dimension.
    """
    first = views[0]
    dim = _dimension(dim, len(first.shape) + 1, first)
    pieces: list[Piece] = []
    for number, view in enumerate(views):
        _check_alike(first, view, first.shape == view.shape)
        for piece in view.pieces:
            offsets, sizes = (
                _put(one, dim, value) for one, value in ((piece.offsets, number), (piece.sizes, 1))
            )
            dims = tuple(at + (at >= dim) for at in piece.dims)
            pieces.append(Piece(offsets, sizes, piece.source, piece.start, dims))
    return first.like(_put(first.shape, dim, len(views)), pieces)


def concat(views: Sequence[View], dim: int) -> View:
    """Return tensors joined along a dimension.

    Raises:
        CannotJoinError: their other dimensions differ, or there is no such dimension.
    """
    first = views[0]
    dim = _dimension(dim, len(first.shape), first)
    pieces: list[Piece] = []
    length = 0
    for view in views:
        is_alike = len(view.shape) == len(first.shape) and _with(view.shape, dim, 0) == _with(
            first.shape, dim, 0
        )
        _check_alike(first, view, is_alike)
        for piece in view.pieces:
            offsets = _with(piece.offsets, dim, piece.offsets[dim] + length)
            pieces.append(piece._replace(offsets=offsets))
        length += view.shape[dim]
    return first.like(_with(first.shape, dim, length), pieces)


def cut(view: View, dim: int, begin: int, length: int) -> View:
    """Return the elements from ``begin`` along a dimension."""
    return view.like(_with(view.shape, dim, length), _cut(view, dim, begin, length))


def split(view: View, dim: int, sizes: Sequence[int]) -> list[View]:
    """Return consecutive parts of these sizes along a dimension.

    Raises:
        CannotJoinError: the sizes are not those of the dimension, or there is none.
    """
    dim = _dimension(dim, len(view.shape), view)
    if sum(sizes) != view.shape[dim] or min(sizes, default=0) < 0:
        raise CannotJoinError(
            f"{view.kind} has {view.shape[dim]} along dimension {dim}, not {list(sizes)}"
        )
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    return [cut(view, dim, *part) for part in zip(begins, sizes, strict=True)]


def equal_sizes(view: View, dim: int, parts: int) -> list[int]:
    """Return the sizes of equal parts.

    Raises:
        CannotJoinError: the dimension has no such parts.
    """
    dim = _dimension(dim, len(view.shape), view)
    if view.shape[dim] % parts:
        raise CannotJoinError(
            f"{view.kind} has {view.shape[dim]} along dimension {dim}, which is not {parts} equal "
            "parts"
        )
    return [view.shape[dim] // parts] * parts


def unstack(view: View, dim: int) -> list[View]:
    """Return the tensors along a dimension, each without that dimension.

    Raises:
        CannotJoinError: there is no such dimension.
    """
    dim = _dimension(dim, len(view.shape), view)
    shape = (*view.shape[:dim], *view.shape[dim + 1 :])
    return [view.like(shape, _without(_cut(view, dim, n, 1), dim)) for n in range(view.shape[dim])]


def transpose(view: View, one: int, other: int) -> View:
    """Return a tensor with two dimensions swapped.

    Raises:
        CannotJoinError: there are no such dimensions, or they are one.
    """
    first, second = one, other
    one, other = (_dimension(dim, len(view.shape), view) for dim in (one, other))
    if one == other:
        raise CannotJoinError(f"dimensions {first} and {second} of {view.kind} are one")
    order = list(range(len(view.shape)))
    order[one], order[other] = other, one
    pieces = (
        piece._replace(
            offsets=tuple(piece.offsets[at] for at in order),
            sizes=tuple(piece.sizes[at] for at in order),
            dims=tuple(order.index(at) if at >= 0 else at for at in piece.dims),
        )
        for piece in view.pieces
    )
    return view.like(tuple(view.shape[at] for at in order), pieces)


def reorder(view: View, dim: int, order: Sequence[int]) -> View:
    """Return a tensor whose elements along a dimension are in another order."""
    return concat([cut(view, dim, at, 1) for at in order], dim)


def _cut(view: View, dim: int, begin: int, length: int) -> Iterator[Piece]:
    for piece in view.pieces:
        first = max(piece.offsets[dim], begin)
        last = min(piece.offsets[dim] + piece.sizes[dim], begin + length)
        if first >= last and length and piece.sizes[dim]:
            continue
        ahead = first - piece.offsets[dim]
        start = tuple(
            at + ahead if of == dim else at for at, of in zip(piece.start, piece.dims, strict=True)
        )
        offsets = _with(piece.offsets, dim, first - begin)
        sizes = _with(piece.sizes, dim, max(last - first, 0))
        yield Piece(offsets, sizes, piece.source, start, piece.dims)


def _without(pieces: Iterable[Piece], dim: int) -> Iterator[Piece]:
    """Yield pieces without a dimension, of which they have one element."""
    for piece in pieces:
        offsets, sizes = ((*one[:dim], *one[dim + 1 :]) for one in (piece.offsets, piece.sizes))
        dims = tuple(-1 if at == dim else at - (at > dim) for at in piece.dims)
        yield Piece(offsets, sizes, piece.source, piece.start, dims)


def _check_alike(first: View, view: View, has_shape: bool) -> None:
    if (view.dtype, view.array) != (first.dtype, first.array) or not has_shape:
        both = f"{first.kind} and {view.kind} do not fit together"
        if view.dtype != first.dtype:
            both += (
                ": joined tensors must have one dtype in the checkpoint; cast= converts the whole"
            )
        raise CannotJoinError(both)


def _dimension(dim: int, dims: int, view: View) -> int:
    """Return the number of a dimension, which may count from the end."""
    if not -dims <= dim < dims:
        raise CannotJoinError(f"{view.kind} has no dimension {dim}")
    if view.dtype.startswith(("F4", "F6")):
        raise CannotJoinError(f"{view.dtype} has no whole bytes to join or to cut at")
    return dim % dims


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])


def _put(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim:])
