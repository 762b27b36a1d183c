"""Loads in which bytes that every rank needs are read by one rank and sent to the others.

Only the coordinator sees all plans. It picks what every rank asks for and notes it, in one order,
in each plan. From that alone all ranks work out the same batches, and who reads which. Each rank
reads one batch ahead while those of the others go over the wire.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ringstow._errors import Error
from ringstow._report import LoadReport
from ringstow.dcp import _targets
from ringstow.dcp._targets import Fill, Slice

# One batch is read while another is on the wire, and the native side has memory of its own.
_BATCHES_A_POOL = 4
# Every dtype may start there.
_ALIGNMENT = 64

Broadcast = bool | dist.ProcessGroup | None


class Note(NamedTuple):
    """A plan's ``storage_data`` on its way to the coordinator."""

    willing: bool
    """Whether this rank's reader broadcasts."""
    stamp: str | None
    """Which checkpoint it has opened."""


class Share(NamedTuple):
    """What all ranks load together. Comes back from the coordinator as ``storage_data``."""

    items: list[int]
    """Numbers of the items in this rank's plan, in the order that all ranks keep."""
    nbytes: int
    """Of all of them."""
    batch_bytes: int


class Batch(NamedTuple):
    """What goes over the wire at once."""

    source: int
    """The rank, in the group, that reads it."""
    fills: list[Fill]


def group_of(broadcast: Broadcast) -> dist.ProcessGroup | None:
    """Return the group that a reader broadcasts in; None if this process is in none."""
    if not broadcast or not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if broadcast is True else broadcast
    return group if dist.get_rank(group) >= 0 else None


def plan(
    plans: list[LoadPlan], nbytes_of: Callable[[ReadItem], int], pool_bytes: int
) -> list[LoadPlan]:
    """Note in each plan what all of them ask for; ``nbytes_of`` is 0 for what can't be shared."""
    numbers: list[dict[object, int]] = []
    for each in plans:
        first: dict[object, int] = {}
        for number, item in enumerate(each.items):
            first.setdefault(_box(item), number)
        numbers.append(first)
    items = plans[0].items
    sizes = {
        box: nbytes_of(items[number])
        for box, number in numbers[0].items()
        if all(box in other for other in numbers)
    }
    boxes = [box for box, nbytes in sizes.items() if nbytes]
    nbytes = sum(sizes.values())
    # Small enough that every rank has one.
    batch_bytes = max(min(pool_bytes // _BATCHES_A_POOL, -(-nbytes // len(plans))), 1)
    return [
        dataclasses.replace(
            each, storage_data=Share([first[box] for box in boxes], nbytes, batch_bytes)
        )
        for each, first in zip(plans, numbers, strict=True)
    ]


def _box(item: ReadItem) -> object:
    where = item.storage_index
    return (where.fqn, where.offset, tuple(item.storage_offsets), tuple(item.lengths), item.type)


class Exchange:
    """A load's traffic with the other ranks. Each of them makes the same calls."""

    def __init__(self, group: dist.ProcessGroup, read: Callable[[list[Slice]], LoadReport]) -> None:
        self._group = group
        self._read = read
        self._rank = dist.get_rank(group)
        # Other back ends take what lies in host memory. NCCL's batches are read to the GPU at once.
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._free: list[torch.Tensor] = []

    def agree(self, error: BaseException | None) -> None:
        """Return if no rank has failed.

        Raises:
            Error: another rank has.
            Exception: what this one failed of.
        """
        failed = torch.tensor(0 if error is None else self._rank + 1, device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, self._group)
        if error is not None:
            raise error
        if failed:
            raise Error(
                f"rank {int(failed) - 1} could not do its part of the load; its own error says why"
            )

    def run(self, fills: list[Fill], share: Share) -> list[LoadReport]:
        """Fill the targets on all ranks, and return what this one read for it.

        Raises:
            Error: another rank has failed.
            Exception: what this one failed of.
        """
        batches: list[Batch] = []
        error: BaseException | None = None
        try:
            batches = list(_schedule(fills, share, dist.get_world_size(self._group)))
        except Exception as caught:
            error = caught
        self.agree(error)
        mine = iter([batch for batch in batches if batch.source == self._rank])
        reports: list[LoadReport] = []
        with ThreadPoolExecutor(1, "ringstow-broadcast") as thread:
            ahead = None
            try:
                ahead = self._read_next(mine, thread)
            except Exception as caught:  # no memory: told to the others when they next ask
                error = caught
            for batch in batches:
                wire = None
                try:
                    if batch.source != self._rank:
                        wire = self._memory(batch)
                    elif error is None and ahead is not None:
                        wire, report = ahead.result()
                        reports.append(report)
                        ahead = self._read_next(mine, thread)
                except BaseException as caught:
                    error = error or caught
                self.agree(error)
                assert wire is not None
                error = self._send(batch, wire)
        self.agree(error)
        return reports

    def _read_next(
        self, mine: Iterator[Batch], thread: ThreadPoolExecutor
    ) -> Future[tuple[torch.Tensor, LoadReport]] | None:
        batch = next(mine, None)
        if batch is None:
            return None
        wire = self._memory(batch)
        # Not in the thread, which has a current stream of its own: on this one's the memory's
        # earlier use comes to its end.
        pairs = zip(batch.fills, _views(batch, wire), strict=True)
        slices = [fill.slice_to(view) for fill, view in pairs]
        return thread.submit(lambda: (wire, self._read(slices)))

    def _send(self, batch: Batch, wire: torch.Tensor) -> BaseException | None:
        """Send or receive a batch; returns what went wrong with it here."""
        source = dist.get_global_rank(self._group, batch.source)
        used = wire[: _length(batch)]
        dist.broadcast(used, source, self._group)
        try:
            for fill, view in zip(batch.fills, _views(batch, used), strict=True):
                _targets.deliver(fill, view)
            self._free.append(wire)
        except BaseException as error:
            return error  # told to the others when they next ask
        return None

    def _memory(self, batch: Batch) -> torch.Tensor:
        nbytes = _length(batch)
        fitting = [n for n, memory in enumerate(self._free) if len(memory) >= nbytes]
        if fitting:
            return self._free.pop(fitting[0])
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _schedule(fills: list[Fill], share: Share, world_size: int) -> Iterator[Batch]:
    """Yield the batches in the order in which they are sent: of every rank in turn."""
    nbytes = sum(fill.nbytes for fill in fills)
    if nbytes != share.nbytes:
        raise Error(
            "the ranks do not see the same checkpoint: was it replaced while it was being loaded? "
            "Load again"
        )
    of_rank: list[list[list[Fill]]] = [[] for _ in range(world_size)]
    before = 0
    for batch in _targets.batches(fills, share.batch_bytes):
        # Neighbours go to the same rank: they lie in the same blocks.
        of_rank[before * world_size // nbytes].append(batch)
        before += sum(fill.nbytes for fill in batch)
    for turn in range(max(map(len, of_rank), default=0)):
        for rank, batches in enumerate(of_rank):
            if turn < len(batches):
                yield Batch(rank, batches[turn])


def _length(batch: Batch) -> int:
    return sum(_padded(fill.nbytes) for fill in batch.fills)


def _views(batch: Batch, wire: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each fill's place in a batch's memory, as a tensor of the stored dtype."""
    at = 0
    for fill in batch.fills:
        yield wire[at : at + fill.nbytes].view(fill.dtype).view(fill.target.shape)
        at += _padded(fill.nbytes)


def _padded(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
