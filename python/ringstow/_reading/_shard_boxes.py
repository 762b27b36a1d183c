"""Boxes of stored tensors to load: one rank's part of a sharded tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow._reading._mapped_tensors import Opened
from ringstow._state.tensors import _cuda, _torch
from ringstow._state.tensors._memory import Stored, in_elements, moved, overlap, share_elements
from ringstow._state.tree._walk import Leaf, describe

if TYPE_CHECKING:
    import torch

    from ringstow._reports._io_reports import LoadReport
    from ringstow._state.tree._walk import Path

Shape = tuple[int, ...]

# Number of copies to make at once.
_COPIED_BYTES = 256 << 20


class Boxed(NamedTuple):
    """A local tensor, and the box of the stored tensor to fill it with."""

    local: torch.Tensor
    dtype: str
    """The local tensor's dtype."""
    offsets: Shape
    """Where the box begins, in elements of the stored dtype."""
    leaf: Leaf
    stored: Stored
    path: Path

    @property
    def shape(self) -> Shape:
        """The box's shape, in elements of the stored dtype."""
        return in_elements(tuple(self.local.shape), self.stored.dtype)


def fill(checkpoint: Opened, boxes: list[Boxed]) -> LoadReport | None:
    """Fill local tensors; return the report, None if nothing was read.

    Reads directly into memory where possible. Reads into a copy for another dtype or device, and
    for memory that several of the tensors share.
    """
    direct, copied = _split(boxes)
    reports = []
    if direct:
        reports.append(_read(checkpoint, [(box, box.local) for box in direct]))
        _torch.mark_changed(box.local for box in direct)
    for batch in _batches(copied):
        pairs = [(box, _staging(box)) for box in batch]
        reports.append(_read(checkpoint, pairs))
        for box, staged in pairs:
            _torch.copy_into(box.local, staged)
    report: LoadReport | None = None
    for one in reports:
        report = one if report is None else report.followed_by(one)
    return report


def _split(boxes: Iterable[Boxed]) -> tuple[list[Boxed], list[Boxed]]:
    direct: list[Boxed] = []
    copied: list[Boxed] = []
    places: set[tuple[object, int]] = set()
    for box in boxes:
        if not box.local.numel():
            continue
        place = (box.local.device, box.local.data_ptr())
        is_free = place not in places and _takes_bytes(box)
        places.add(place)
        (direct if is_free else copied).append(box)
    return direct, copied


def _takes_bytes(box: Boxed) -> bool:
    local = box.local
    return (
        box.dtype == box.stored.dtype
        and _torch.in_reach(local)
        and not share_elements(local.shape, local.stride())
        # Elements of half a byte have no stride in bytes.
        and (box.stored.dtype != "F4" or local.is_contiguous())
    )


def _batches(boxes: list[Boxed]) -> Iterator[list[Boxed]]:
    batch: list[Boxed] = []
    nbytes = 0
    for box in boxes:
        size = box.local.numel() * 8  # an estimate: 8 bytes an element
        if batch and nbytes + size > _COPIED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(box)
        nbytes += size
    if batch:
        yield batch


def _staging(box: Boxed) -> torch.Tensor:
    dtype = _torch.dtype_of(box.stored.dtype, describe(box.path))
    return _torch.empty(tuple(box.local.shape), dtype)


def _read(checkpoint: Opened, pairs: list[tuple[Boxed, torch.Tensor]]) -> LoadReport:
    from ringstow._reports._io_reports import LoadReport

    slices = [one for box, memory in pairs for one in _slices(checkpoint, box, memory)]
    return LoadReport.from_json(checkpoint.read(slices))


def _slices(checkpoint: Opened, box: Boxed, memory: torch.Tensor) -> Iterator[Any]:
    """Yield the part of each stored chunk inside the box, and its place in the local tensor."""
    name, shape, strides = box.leaf.body, box.shape, _torch.strides_of(memory)
    address = _cuda.address_of(memory)
    for number, (offsets, sizes) in enumerate(checkpoint.chunks(name)):
        if offsets == box.offsets and sizes == shape:
            yield (name, number, (0,) * len(shape), shape, address, strides)
            return
        met = overlap(offsets, sizes, box.offsets, shape)
        if met is None:
            continue
        first, lengths = met
        within = tuple(start - at for start, at in zip(first, offsets, strict=True))
        steps = [start - at for start, at in zip(first, box.offsets, strict=True)]
        if box.stored.dtype == "F4":
            steps[-1] //= 2
        ahead = sum(n * step for n, step in zip(steps, strides, strict=True))
        yield (name, number, within, lengths, moved(address, ahead), strides)
