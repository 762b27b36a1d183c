"""`Mapped`: a checkpoint with tensors that are joined from, or cut out of, those that are stored.

It has the methods of `_native.Checkpoint` that loads use. Each box of such a tensor is read
straight to its place in the target, in one pass that reads nothing twice: no tensor is made in
between.
"""

from __future__ import annotations

import functools
import math
import mmap
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ringstow import _native
from ringstow._foreign import Foreign
from ringstow._state.objects._optimizers import is_optimizer_state
from ringstow._state.tensors._memory import (
    Address,
    InFiles,
    NamedBox,
    dense_strides,
    moved,
    overlap,
)
from ringstow._state.tree._build import Contents
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._tensor_views import Piece, Shape, View
from ringstow._state.tree._walk import Leaf

_Row = tuple[str, str, Shape, int]
_Slice = tuple[str, int, Shape, Shape, Address, tuple[int, ...]]
Fetch = Callable[[InFiles, InFiles], None]
"""Called with what a load is about to read: before it changes anything, and then."""

# Smaller tensors are read into memory of Python's: a process may have 65,530 mappings.
_MAPPED_BYTES_MIN = 1 << 20


class _Part(NamedTuple):
    """A box of a mapped tensor, which one chunk of a stored tensor holds."""

    offsets: Shape
    sizes: Shape
    source: str
    chunk: int
    start: Shape
    """Where it begins in the chunk."""
    dims: tuple[int, ...]
    """The mapped tensor's dimension for each of the chunk; -1: one element."""


class Mapped:
    """A checkpoint, and tensors made of its tensors."""

    def __init__(self, checkpoint: _native.Checkpoint | Foreign) -> None:
        self.inner = checkpoint
        self._views: dict[str, View] = {}
        self._nbytes: dict[str, int] = {}
        self._parts: dict[str, list[_Part]] = {}

    def add(self, name: str, view: View) -> Leaf:
        """Add a tensor, and return its leaf in a skeleton."""
        own, number = f"{name} (rename)", 2
        while own in self._views or self.inner.tensor(own) is not None:
            own, number = f"{name} (rename {number})", number + 1
        self._views[own] = view
        rows = (self.inner.tensor(piece.source) for piece in view.pieces if all(piece.sizes))
        _, _, shape, nbytes = next(filter(None, rows), ("", "", (), 0))
        self._nbytes[own] = nbytes * math.prod(view.shape) // (math.prod(shape) or 1)
        return Leaf("$ndarray" if view.array else "$tensor", own, view.array)

    def tensors_for(self, path: str) -> KnownTensors:
        """Return what a rename without a state dict knows of the tensors."""
        return KnownTensors(Contents(path, self.inner.tensor), self)

    # The contents of the checkpoint.

    @property
    def dropped(self) -> list[str]:
        """Names that `slim` has dropped."""
        return self.inner.dropped

    @property
    def tensors(self) -> list[_Row]:
        """The rows of the tensors that no other is made of, and of those that are made."""
        used = set(self._sources(self._views))
        rows = [row for row in self.inner.tensors if row[0] not in used]
        return [*rows, *filter(None, map(self.tensor, self._views))]

    def tensor(self, name: str) -> _Row | None:
        """Return the row of a tensor; None if there is none."""
        view = self._views.get(name)
        if view is None:
            return self.inner.tensor(name)
        return name, view.dtype, view.shape, self._nbytes[name]

    def chunks(self, name: str) -> list[tuple[Shape, Shape]]:
        """Return offsets and sizes of a tensor's chunks."""
        if name not in self._views:
            return self.inner.chunks(name)
        return [(part.offsets, part.sizes) for part in self._parts_of(name)]

    def check_whole(self, names: list[str]) -> None:
        """Raise MissingShareError if elements of a tensor are not stored."""
        self.inner.check_whole(self._sources(names))

    def with_views(self, damaged: Mapping[str, DamagedTensor]) -> dict[str, DamagedTensor]:
        """Return the damaged tensors by name, and those that are made of them."""
        found = dict(damaged)
        for name, view in self._views.items():
            for piece in view.pieces:
                if piece.source in damaged:
                    found[name] = damaged[piece.source]
        return found

    def in_stored(self, names: Iterable[str], boxes: Iterable[NamedBox]) -> InFiles:
        """Return the stored tensors, and the boxes of stored tensors, that hold these."""
        whole: list[str] = []
        parts: list[NamedBox] = []
        boxes = list(boxes)
        for name in names:
            view = self._views.get(name)
            if view is None:
                whole.append(name)
            else:
                boxes.append((name, (0,) * len(view.shape), view.shape))
        for name, offsets, sizes in boxes:
            if name not in self._views:
                parts.append((name, offsets, sizes))
                continue
            for piece in self._views[name].pieces:
                parts += _met(piece, offsets, sizes)
        return whole, parts

    def _sources(self, names: Iterable[str]) -> list[str]:
        found: dict[str, None] = {}
        for name in names:
            view = self._views.get(name)
            found |= dict.fromkeys([name] if view is None else [one.source for one in view.pieces])
        return list(found)

    # Reads.

    def load(self, names: list[str]) -> tuple[list[Any], str]:
        """Return the bytes of tensors, in memory of their own, and a LoadReport."""
        if self._views.keys().isdisjoint(names):
            return self.inner.load(names)
        sizes = {name: nbytes for name, _, _, nbytes in filter(None, map(self.tensor, names))}
        held = {name: _memory(nbytes) for name, nbytes in sizes.items()}
        report = self.load_into([(name, _address(held[name]), sizes[name]) for name in sizes])
        return [held[name] for name in names], report

    def load_into(self, targets: list[tuple[str, Address, int]]) -> str:
        """Fill dense memory with tensors; return a LoadReport."""
        slices = []
        for name, address, nbytes in targets:
            row = self.tensor(name)
            assert row is not None
            if not nbytes:
                continue
            strides = dense_strides(row[2], nbytes // math.prod(row[2]))
            for number, (offsets, sizes) in enumerate(self.chunks(name)):
                ahead = sum(at * step for at, step in zip(offsets, strides, strict=True))
                origin = (0,) * len(sizes)
                slices.append((name, number, origin, sizes, moved(address, ahead), strides))
        return self.read(slices)

    def read(self, slices: list[_Slice]) -> str:
        """Fill strided memory with regions of tensors; return a LoadReport."""
        return self.inner.read([self._slice(*one) for one in slices])

    def _slice(
        self,
        name: str,
        number: int,
        within: Shape,
        lengths: Shape,
        address: Address,
        strides: tuple[int, ...],
    ) -> _Slice:
        """Return a slice of a stored tensor for one of a mapped tensor."""
        if name not in self._views:
            return name, number, within, lengths, address, strides
        part = self._parts_of(name)[number]
        start = tuple(map(operator.add, part.start, _of_source(part.dims, within, 0)))
        sizes, steps = _of_source(part.dims, lengths, 1), _of_source(part.dims, strides, 0)
        return part.source, part.chunk, start, sizes, address, steps

    def _parts_of(self, name: str) -> list[_Part]:
        parts = self._parts.get(name)
        if parts is None:
            chunks: dict[str, list[tuple[Shape, Shape]]] = {}
            parts = []
            for piece in self._views[name].pieces:
                if piece.source not in chunks:
                    chunks[piece.source] = self.inner.chunks(piece.source)
                for number, chunk in enumerate(chunks[piece.source]):
                    parts += _in_chunk(piece, number, *chunk)
            self._parts[name] = parts
        return parts


class KnownTensors:
    """What a rename knows of tensors: the checkpoint's, and the shapes of a state dict's."""

    def __init__(
        self,
        contents: Contents,
        mapped: Mapped | None,
        shapes: Callable[[], Mapping[str, Shape]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            contents: what the checkpoint stores.
            mapped: where joined and split tensors go; None if the rename makes none.
            shapes: called at most once, for the shapes in the state dict; None if there is none.
        """
        self.stored = contents.stored
        self.has_state = shapes is not None
        self._mapped = mapped
        self._shapes_of = shapes

    @functools.cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        return {} if self._shapes_of is None else self._shapes_of()

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor of the state dict; None if there is none."""
        return self._shapes.get(name)

    def is_optimizer(self, node: object) -> bool:
        """Return whether a dict is an optimizer's state dict, or the skeleton of one."""
        return is_optimizer_state(node)

    def leaf(self, name: str, view: View) -> Leaf:
        """Return a leaf of the skeleton that stands for a view."""
        assert self._mapped is not None
        return self._mapped.add(name, view)


def _in_chunk(piece: Piece, number: int, offsets: Shape, sizes: Shape) -> Iterable[_Part]:
    """Return what a chunk of the source holds of a piece; nothing if they do not overlap."""
    met = overlap(piece.start, _of_source(piece.dims, piece.sizes, 1), offsets, sizes)
    if met is None:
        return ()
    at, lengths = list(piece.offsets), list(piece.sizes)
    for of, begin, low, length in zip(piece.dims, piece.start, *met, strict=True):
        if of >= 0:
            at[of] += low - begin
            lengths[of] = length
    start = tuple(map(operator.sub, met[0], offsets))
    return (_Part(tuple(at), tuple(lengths), piece.source, number, start, piece.dims),)


def _met(piece: Piece, offsets: Shape, sizes: Shape) -> Iterable[NamedBox]:
    """Return what a box of the mapped tensor takes of a piece, as a box of the source, if any."""
    met = overlap(piece.offsets, piece.sizes, offsets, sizes)
    if met is None:
        return ()
    ahead = _of_source(piece.dims, tuple(map(operator.sub, met[0], piece.offsets)), 0)
    start = tuple(map(operator.add, piece.start, ahead))
    return ((piece.source, start, _of_source(piece.dims, met[1], 1)),)


def _of_source(dims: tuple[int, ...], values: Shape, otherwise: int) -> Shape:
    """Return a view's values for each dimension of the source; ``otherwise`` for one element."""
    return tuple(otherwise if of < 0 else values[of] for of in dims)


def _memory(nbytes: int) -> bytearray | mmap.mmap:
    return bytearray(nbytes) if nbytes < _MAPPED_BYTES_MIN else mmap.mmap(-1, nbytes)


def _address(block: bytearray | mmap.mmap) -> int:
    import ctypes  # a slow import

    return ctypes.addressof(ctypes.c_char.from_buffer(block)) if len(block) else 0


Opened: TypeAlias = "_native.Checkpoint | Foreign | Mapped"


def in_stored(checkpoint: Opened, names: Iterable[str], boxes: Iterable[NamedBox] = ()) -> InFiles:
    """Return what is stored of these tensors and boxes."""
    if isinstance(checkpoint, Mapped):
        return checkpoint.in_stored(names, boxes)
    return list(names), list(boxes)
