"""Loads in which one rank reads the bytes that every rank needs, and sends them to the others.

Only the coordinator sees all plans. It notes in each plan, in the same order, the items that every
rank asks for. From these notes all ranks derive the same batches, and the rank that reads each.
Each rank reads its next batch while the other ranks send theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ringstow._core._errors import Error
from ringstow._reports._io_reports import LoadReport
from ringstow.dcp import _targets
from ringstow.dcp._targets import Fill, Slice

# One batch is read while another is sent, and the native side has its own memory.
_BATCHES_A_POOL = 4
# In bytes; enough for every dtype.
_ALIGNMENT = 64

Broadcast = bool | dist.ProcessGroup | None


class Note(NamedTuple):
    """A plan's ``storage_data``, sent to the coordinator."""

    willing: bool
    """Whether this rank's reader broadcasts."""
    fingerprint: str | None
    """The fingerprint of the checkpoint that it has opened."""


class Share(NamedTuple):
    """The items that all ranks load together; the ``storage_data`` that the coordinator returns."""

    items: list[int]
    """Numbers of the items in this rank's plan, in the order that all ranks keep."""
    nbytes: int
    """Bytes of all these items."""
    batch_bytes: int


class Batch(NamedTuple):
    """The items that one rank sends at once."""

    source: int
    """The rank, in the group, that reads it."""
    fills: list[Fill]


def group_of(broadcast: Broadcast) -> dist.ProcessGroup | None:
    """Return the group that a reader broadcasts in; None if this process is not in it."""
    if not broadcast or not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if broadcast is True else broadcast
    return group if dist.get_rank(group) >= 0 else None


def plan(
    plans: list[LoadPlan], nbytes_of: Callable[[ReadItem], int], pool_bytes: int
) -> list[LoadPlan]:
    """Note in each plan the items that all plans ask for.

    ``nbytes_of`` returns an item's bytes, or 0 if ranks can't share it.
    """
    numbers: list[dict[object, int]] = []
    for each in plans:
        first: dict[object, int] = {}
        for number, item in enumerate(each.items):
            first.setdefault(_region(item), number)
        numbers.append(first)
    items = plans[0].items
    sizes = {
        region: nbytes_of(items[number])
        for region, number in numbers[0].items()
        if all(region in other for other in numbers)
    }
    regions = [region for region, nbytes in sizes.items() if nbytes]
    nbytes = sum(sizes.values())
    # Small enough that every rank reads at least one batch.
    batch_bytes = max(min(pool_bytes // _BATCHES_A_POOL, -(-nbytes // len(plans))), 1)
    return [
        dataclasses.replace(
            each, storage_data=Share([first[region] for region in regions], nbytes, batch_bytes)
        )
        for each, first in zip(plans, numbers, strict=True)
    ]


def _region(item: ReadItem) -> object:
    where = item.storage_index
    return (where.fqn, where.offset, tuple(item.storage_offsets), tuple(item.lengths), item.type)


class Exchange:
    """A load's communication with the other ranks, which all make the same calls."""

    def __init__(self, group: dist.ProcessGroup, read: Callable[[list[Slice]], LoadReport]) -> None:
        self._group = group
        self._read = read
        self._rank = dist.get_rank(group)
        # NCCL sends GPU memory, so its batches are read there; other back ends send host memory.
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._free: list[torch.Tensor] = []

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a part of the load that every rank runs; fail on all ranks if it fails on one.

        Raises:
            Error: another rank has failed.
            Exception: this rank's own failure.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        failed = torch.tensor(0 if error is None else self._rank + 1, device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, self._group)
        if error is not None:
            raise error
        if failed:
            raise Error(
                f"rank {int(failed) - 1} could not read its share of the load; see its own error"
            )

    def run(self, fills: list[Fill], share: Share) -> list[LoadReport]:
        """Fill the targets on all ranks, and return the reports of this rank's reads.

        Raises:
            Error: another rank has failed.
            Exception: this rank's own failure.
        """
        reports: list[LoadReport] = []
        sent: tuple[Batch, torch.Tensor] | None = None
        with ThreadPoolExecutor(1, "ringstow-broadcast") as thread:
            with self.together():
                batches = list(_schedule(fills, share, dist.get_world_size(self._group)))
                mine = iter([batch for batch in batches if batch.source == self._rank])
                ahead = self._read_next(mine, thread)
            for batch in batches:
                with self.together():
                    if sent is not None:
                        self._deliver(*sent)
                    if batch.source != self._rank:
                        wire = self._memory(batch)
                    else:
                        assert ahead is not None
                        wire, report = ahead.result()
                        reports.append(report)
                        ahead = self._read_next(mine, thread)
                source = dist.get_global_rank(self._group, batch.source)
                dist.broadcast(wire[: _length(batch)], source, self._group)
                sent = batch, wire
        with self.together():
            if sent is not None:
                self._deliver(*sent)
        return reports

    def _read_next(
        self, mine: Iterator[Batch], thread: ThreadPoolExecutor
    ) -> Future[tuple[torch.Tensor, LoadReport]] | None:
        batch = next(mine, None)
        if batch is None:
            return None
        wire = self._memory(batch)
        # Not in the reading thread: its current CUDA stream is another one, and this thread's
        # stream may still use the memory.
        pairs = zip(batch.fills, _views(batch, wire), strict=True)
        slices = [fill.slice_to(view) for fill, view in pairs]
        return thread.submit(lambda: (wire, self._read(slices)))

    def _deliver(self, batch: Batch, wire: torch.Tensor) -> None:
        """Copy a batch that was sent or received into its targets."""
        for fill, view in zip(batch.fills, _views(batch, wire), strict=True):
            _targets.deliver(fill, view)
        self._free.append(wire)

    def _memory(self, batch: Batch) -> torch.Tensor:
        nbytes = _length(batch)
        fitting = [n for n, memory in enumerate(self._free) if len(memory) >= nbytes]
        if fitting:
            return self._free.pop(fitting[0])
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _schedule(fills: list[Fill], share: Share, world_size: int) -> Iterator[Batch]:
    """Yield the batches in sending order, one of each rank in turn."""
    nbytes = sum(fill.nbytes for fill in fills)
    if nbytes != share.nbytes:
        raise Error(
            "the ranks do not see the same checkpoint; a save may have replaced it during the "
            "load: load again"
        )
    of_rank: list[list[list[Fill]]] = [[] for _ in range(world_size)]
    before = 0
    for batch in _targets.batches(fills, share.batch_bytes):
        # Neighbours go to the same rank: they share checksum chunks on disk.
        of_rank[before * world_size // nbytes].append(batch)
        before += sum(fill.nbytes for fill in batch)
    for turn in range(max(map(len, of_rank), default=0)):
        for rank, batches in enumerate(of_rank):
            if turn < len(batches):
                yield Batch(rank, batches[turn])


def _length(batch: Batch) -> int:
    return sum(_padded(fill.nbytes) for fill in batch.fills)


def _views(batch: Batch, wire: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each fill's share of a batch's memory, as a tensor of the stored dtype."""
    at = 0
    for fill in batch.fills:
        yield wire[at : at + fill.nbytes].view(fill.dtype).view(fill.target.shape)
        at += _padded(fill.nbytes)


def _padded(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
