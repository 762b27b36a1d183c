"""Sends parts of a checkpoint's files between the ranks of a load: each is read by one of them.

All ranks go through the same list of parts in the same order. One of the ranks that take a part
reads it and sends it to one rank of each other host, which passes it on to the others there. What a
rank gets is a cache: its load checks it like everything else, and reads from the file what does
not come. So a part that cannot be read, or is damaged, is every rank's own error or repair.
"""

from __future__ import annotations

import collections
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from ringstow import _native
from ringstow._ranks._group import Group

PART_BYTES = 4 << 20
# Slots that a load keeps: parts that wait to be taken, are read, sent or received.
_SLOTS_MIN = 16
_PAGE = 4096
# After the bytes of a part: its number, counted from 1, or 0 if its reader could not read it.
MARK_BYTES = 8
# Parts that are read, received and sent at once are an eighth of the slots each, and at most these.
_AT_ONCE_MAX = 4
# The first message between two ranks may have to connect them.
_TRIES = 2
# After so many parts the ranks agree whether to go on, then after twice as many, up to the last.
STRETCH, _STRETCH_MAX = 16, 128


class Part(NamedTuple):
    """A range of a file, and the ranks that take it."""

    file: int
    begin: int
    end: int
    takers: tuple[int, ...]


class Own(NamedTuple):
    """A part that this rank reads or receives, and sends."""

    number: int
    """Among all parts."""
    part: Part
    source: int
    """The rank that it comes from: this one, if it reads the part."""
    to: list[int]
    """The ranks that this one sends it to."""


def memory_min(config: str) -> int:
    """Return the bytes of memory that a load with these settings needs to share at all.

    A block may span several parts, and the load needs all of them at once.
    """
    block_bytes: int = json.loads(config)["block_bytes"]
    return max(_SLOTS_MIN << 20, 3 * block_bytes)


def slots_for(memory_bytes: int) -> tuple[int, int]:
    """Return how many slots fit into so much memory, and the bytes of a part."""
    part_bytes = min(PART_BYTES, max(memory_bytes // _SLOTS_MIN // _PAGE, 16) * _PAGE)
    return max(memory_bytes // part_bytes, _SLOTS_MIN), part_bytes


def own_parts(parts: list[Part], hosts: list[str], rank: int) -> list[Own]:
    """Return the parts in which a rank takes part.

    Readers take turns, and so do the ranks of a host that receive a part for it.

    Args:
        parts: all parts.
        hosts: the host of each rank.
        rank: the rank.
    """
    by_host: dict[tuple[int, ...], list[list[int]]] = {}
    found = []
    for number, part in enumerate(parts):
        takers = part.takers
        if takers not in by_host:
            groups: dict[str, list[int]] = {}
            for taker in takers:
                groups.setdefault(hosts[taker], []).append(taker)
            by_host[takers] = list(groups.values())
        if rank not in takers:
            continue
        reader = takers[number % len(takers)]
        to: list[int] = []
        source = reader
        for ranks in by_host[takers]:
            first = reader if reader in ranks else ranks[number % len(ranks)]
            if rank == reader and first != reader:
                to.append(first)
            if rank == first:
                to += [one for one in ranks if one != first]
            elif rank in ranks:
                source = first
        found.append(Own(number, part, source, to))
    return found


class Transfer:
    """Reads, sends and receives parts in a thread, while this rank loads."""

    def __init__(
        self,
        ranks: Group,
        arrivals: _native.Arrivals,
        own: list[Own],
        slots: int,
        *,
        count: int,
        allowed_s: float,
    ) -> None:
        """Start the threads, which wait for `begin`.

        Args:
            ranks: the ranks.
            arrivals: what this rank's load takes parts from; knows the parts of ``own``.
            own: this rank's parts.
            slots: the slots of ``arrivals``.
            count: how many parts there are.
            allowed_s: seconds that a part may take; a stretch in which they take more ends it all.
        """
        self._ranks = ranks
        self._arrivals = arrivals
        self._own = own
        self._count = count
        self._allowed_s = allowed_s
        self._at_once = max(min(slots // 8, _AT_ONCE_MAX), 1)
        self._is_begun = threading.Event()
        self._is_over = False
        self._has_failed = False
        self.read_bytes = 0
        """Bytes that this rank has read for itself and others."""
        self._due: queue.SimpleQueue[tuple[torch.Tensor, list[int]] | None] = queue.SimpleQueue()
        self._is_given_up = False
        self._threads: list[threading.Thread] = []
        try:
            for target, name in ((self._run, "parts"), (self._send, "send")):
                thread = threading.Thread(target=target, name=f"ringstow-share-{name}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.give_up()
            raise

    def begin(self) -> None:
        """Begin. All ranks call it, or `give_up`."""
        self._is_begun.set()

    def give_up(self) -> None:
        """End without having begun."""
        self._is_given_up = True
        self._is_begun.set()
        self._due.put(None)
        self._join()

    def end(self, *, failed: bool) -> None:
        """Wait until no rank needs this one any more. No collective may run before.

        Args:
            failed: whether this rank's load has failed: all ranks then end soon.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile. No rank waits for this one then, either.
        """
        self._is_over = True
        self._has_failed = failed
        self._arrivals.close()
        self._join()

    def _join(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        for thread in self._threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as error:  # the others must not wait for this rank
                    interrupt = error
                    self._has_failed = True
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        self._is_begun.wait()
        if self._is_given_up:
            return
        try:
            with ThreadPoolExecutor(self._at_once, "ringstow-share-read") as readers:
                self._all_parts(readers)
        finally:
            self._arrivals.close()
            self._due.put(None)

    def _all_parts(self, readers: ThreadPoolExecutor) -> None:
        due = collections.deque(enumerate(self._own))
        begin, stretch = 0, STRETCH
        while True:
            begun = time.monotonic()
            end = begin + stretch
            self._parts_before(end, due, readers)
            if end >= self._count:
                return
            took = time.monotonic() - begun
            if not self._go_on(stops=self._has_failed or took > self._allowed_s * stretch):
                return
            begin, stretch = end, min(2 * stretch, _STRETCH_MAX)

    def _parts_before(
        self, end: int, due: collections.deque[tuple[int, Own]], readers: ThreadPoolExecutor
    ) -> None:
        ahead: collections.deque[tuple[int, Own, _native.Slot, _Pending]] = collections.deque()
        while ahead or (due and due[0][1].number < end):
            while len(ahead) < self._at_once and due and due[0][1].number < end:
                slot = self._arrivals.slot(not ahead)
                if slot is None:  # those that are on the way come first
                    break
                number, one = due.popleft()
                ahead.append((number, one, slot, self._begun(one, slot, readers)))
            self._finish(*ahead.popleft())

    def _go_on(self, *, stops: bool) -> bool:
        """Return whether no rank wants to stop."""
        said = torch.tensor(int(stops), device="cpu")
        try:
            self._ranks.begin_largest(said)()
        except Exception:  # a rank has ended
            return False
        return not said

    def _begun(self, one: Own, slot: _native.Slot, readers: ThreadPoolExecutor) -> _Pending:
        memory = torch.frombuffer(slot, dtype=torch.uint8)
        if one.source == self._ranks.rank:
            return _Pending(memory, readers.submit(self._read, one, slot, memory), None)
        nbytes = one.part.end - one.part.begin
        wait = None
        with contextlib.suppress(Exception):  # the rank that it comes from has ended
            wait = self._ranks.begin_receive(memory[: nbytes + MARK_BYTES], one.source)
        return _Pending(memory, None, wait)

    def _read(self, one: Own, slot: _native.Slot, memory: torch.Tensor) -> bool:
        part, nbytes = one.part, one.part.end - one.part.begin
        is_read = False
        with contextlib.suppress(Exception):  # each rank's load finds that out for itself
            if not self._has_failed:
                self._arrivals.read(slot, part.file, part.begin, nbytes)
                self.read_bytes += nbytes
                is_read = True
        memory[nbytes : nbytes + MARK_BYTES] = _mark(one) if is_read else 0
        return is_read

    def _finish(self, number: int, one: Own, slot: _native.Slot, pending: _Pending) -> None:
        nbytes = one.part.end - one.part.begin
        message = pending.memory[: nbytes + MARK_BYTES]
        is_good = pending.is_good(one)
        if not is_good:
            message[nbytes:] = 0
        if one.to:
            self._due.put((message, one.to))
        if is_good and not self._is_over:
            self._arrivals.put(number, slot, pending.future is not None)
        else:
            self._arrivals.lost(number)

    def _send(self) -> None:
        """Send what is due; a slot is free again once all have it."""
        sent: collections.deque[list[Callable[[], None]]] = collections.deque()
        while True:
            due = self._due.get()
            while sent and (due is None or len(sent) >= self._at_once):
                for wait in sent.popleft():
                    with contextlib.suppress(Exception):  # the rank has ended
                        wait()
            if due is None:
                return
            message, to = due
            waits = []
            for rank in to:
                with contextlib.suppress(Exception):
                    waits.append(self._ranks.begin_send(message, rank))
            sent.append(waits)


class _Pending(NamedTuple):
    """A part on its way into memory."""

    memory: torch.Tensor
    future: Future[bool] | None
    wait: Callable[[], None] | None

    def is_good(self, one: Own) -> bool:
        """Wait; return whether the part is there."""
        if self.future is not None:
            return self.future.result()
        if self.wait is None:
            return False
        try:
            self.wait()
        except Exception:  # the rank that it comes from has ended
            return False
        nbytes = one.part.end - one.part.begin
        return self.memory[nbytes : nbytes + MARK_BYTES].equal(_mark(one))


def _mark(one: Own) -> torch.Tensor:
    number = (one.number + 1).to_bytes(MARK_BYTES, "little")
    return torch.frombuffer(bytearray(number), dtype=torch.uint8)


def measured_rate(ranks: Group, nbytes: int) -> float:
    """Return how many bytes per second the slowest rank receives while all send. All call it."""
    half = ranks.size // 2 or 1
    seconds = []
    with contextlib.suppress(Exception):  # then nothing is sent
        sent, got = (
            torch.zeros(nbytes // _TRIES, dtype=torch.uint8, device="cpu") for _ in range(2)
        )
        for _ in range(_TRIES):
            begun = time.monotonic()
            waits = [
                ranks.begin_receive(got, (ranks.rank - half) % ranks.size),
                ranks.begin_send(sent, (ranks.rank + half) % ranks.size),
            ]
            for wait in waits:
                wait()
            seconds.append(time.monotonic() - begun)
    return nbytes // _TRIES / max(ranks.gathered(min(seconds, default=float("inf"))))


def cut(begin: int, end: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of a file."""
    for at in range(begin, end, part_bytes):
        yield at, min(at + part_bytes, end)
