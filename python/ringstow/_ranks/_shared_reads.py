"""How the ranks of a load share what several of them need.

Ranks of a host share its page cache: one rank's read fills it, the others copy. Between hosts one
rank reads a part of a file and sends it to the others. Otherwise each rank reads past the page
cache, straight into its memory. What pays, the ranks measure.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import mmap
import operator
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ringstow import _native
from ringstow._core import _files
from ringstow._ranks import _sent_parts
from ringstow._ranks._group import Group
from ringstow._ranks._sent_parts import Part, Transfer
from ringstow._state.tensors._memory import InFiles

_log = logging.getLogger("ringstow")
# Units that a rank's needs are counted in: few enough for a message of all ranks, each a block or
# more.
_UNITS_MAX, _UNITS_MIN = 1 << 15, 1 << 10
_UNITS_OF_ALL_MAX = 1 << 21
_UNIT_BYTES_MIN = 4 << 20
# All of a unit: of slices of a tensor, several ranks need parts of one unit, and no byte twice.
_WHOLE = 255
# A rank that needs less of a unit than this reads it itself.
_SHARE_MIN = 16
# A smaller checkpoint is read before a choice pays.
_SHARED_BYTES_MIN = 128 << 20
# How many ranks must need a byte, on average.
_RANKS_MIN = 1.5
# What each rank reads to measure the disk: reads at the same time, and the bytes of each.
_READS = 4
_READ_BYTES = 2 << 20
# What one core copies out of the page cache, in bytes per second. A sample of a disk with a burst
# allowance finds it faster than it is: a higher figure errs on the side that reads less.
_COPIED_A_CORE = 2e9
# What a rank sends and receives to measure the group.
_SENT_BYTES = 8 << 20
# Sending must take at most this share of the time of any other way: what is measured varies.
_GAIN = 0.8
# What takes so many times as long as another way should is given up: a sample of a disk with a
# burst allowance expects too much of the other way.
_TOO_SLOW = 1.5
# With fewer cores a rank, reading and sending take turns.
_CORES_MIN = 2


class Needs(NamedTuple):
    """What one rank is about to read."""

    host: str
    units: tuple[bytes, ...]
    """How much of each unit of the checkpoint's files each pass of its load reads, up to `_WHOLE`;
    nothing for a pass that reads nothing."""
    unit_bytes: int
    directories: tuple[int, ...]
    """The directory of each of the checkpoint's files, as this rank has found them, by a number."""
    memory_bytes: int
    """For what it reads for others, and receives."""
    bound_to: int
    """The cores of its host that it is bound to, as bits."""
    cores: int
    """How many it may use: fewer than it is bound to, if its container has less than their time."""

    @classmethod
    def of(
        cls, ranks: Group, checkpoint: _native.Checkpoint, passes: Iterable[InFiles], config: str
    ) -> Needs:
        """Return the needs of a rank whose passes read these tensors, and boxes of tensors."""
        sizes = _sizes(checkpoint)
        unit_bytes = _unit_bytes(sizes, ranks.size)
        memory = max(_native.staging_bytes(config) // 2, _sent_parts.memory_min(config))
        needed = [_native.needed(checkpoint, *one) for one in passes]
        units = tuple(_units(sizes, unit_bytes, ranges) for ranges in needed)
        known: dict[str, int] = {}
        where = (os.path.dirname(path) for _, path, _, _ in _native.files_of(checkpoint))
        directories = tuple(known.setdefault(one, len(known)) for one in where)
        host, cores = _native.boot_id(), _native.cores()
        return cls(host, units, unit_bytes, directories, memory, _bound_to(), cores)


def shown(config: str) -> tuple[str, ...]:
    """Return what must be alike on all ranks, for messages."""
    share = json.loads(config)["share_reads"]
    return () if share == "auto" else (f"Config(share_reads={share!r})",)


def may_share(config: str) -> bool:
    """Return whether the settings let ranks share."""
    return bool(json.loads(config)["share_reads"] != "off")


def may_pay(ranks: Group, checkpoint: _native.Checkpoint, config: str) -> bool:
    """Return whether ranks are to compare what they need; all of them return the same."""
    if ranks.size == 1 or not may_share(config):
        return False
    return bool(shown(config)) or sum(_sizes(checkpoint)) >= _SHARED_BYTES_MIN


class _Unit(NamedTuple):
    number: int
    file: int
    begin: int
    end: int


class Sharing:
    """How the ranks share what one load reads, until its end."""

    def __init__(
        self,
        ranks: Group,
        checkpoint: _native.Checkpoint,
        needs: list[Needs],
        config: str,
        *,
        apart: bool = False,
    ) -> None:
        """Choose, and begin to share. All ranks call it.

        Args:
            ranks: the ranks.
            checkpoint: what this rank has opened.
            needs: what each rank reads.
            config: this rank's settings.
            apart: whether the nodes share no directory, and have sent each other what they lack.
        """
        self._checkpoint = checkpoint
        self._transfer: Transfer | None = None
        settings = json.loads(config)
        choice: _Choice | None = None
        try:
            choice = _Choice(ranks, checkpoint, needs)
        except Exception as error:  # the others must not wait for this rank
            _log.warning("the ranks do not share what they read: %s", error)
        can_all = all(one is True for one in ranks.gathered(choice is not None))
        if choice is None or not can_all:
            return
        choice.choose(ranks, settings["share_reads"], apart=apart)
        if choice.way == "host":
            checkpoint.read_through_page_cache()
        elif choice.way == "group":
            if choice.otherwise_by_host:
                checkpoint.read_through_page_cache()
            self._begin(ranks, needs, choice, is_direct=settings["direct"] != "off")

    def _begin(self, ranks: Group, needs: list[Needs], choice: _Choice, *, is_direct: bool) -> None:
        """Begin to send, if all ranks can."""
        prepared: tuple[Transfer, _native.Arrivals] | None = None
        try:
            prepared = self._prepared(ranks, needs, choice, is_direct=is_direct)
        except Exception as error:  # the others must not wait for this rank
            _log.warning("the ranks do not send each other what they read: %s", error)
        try:
            can_all = all(one is True for one in ranks.gathered(prepared is not None))
        except BaseException:
            if prepared is not None:
                prepared[0].give_up()
            raise
        if prepared is None:
            return
        transfer, arrivals = prepared
        if not can_all:
            transfer.give_up()
            return
        self._checkpoint.take_from(arrivals)
        self._transfer = transfer
        transfer.begin()

    def _prepared(
        self, ranks: Group, needs: list[Needs], choice: _Choice, *, is_direct: bool
    ) -> tuple[Transfer, _native.Arrivals]:
        slots, part_bytes = _sent_parts.slots_for(max(one.memory_bytes for one in needs))
        parts = choice.parts(part_bytes)
        own = _sent_parts.own_parts(parts, [one.host for one in needs], ranks.rank)
        ranges = [(one.part.file, one.part.begin, one.part.end) for one in own]
        size = part_bytes + _sent_parts.MARK_BYTES
        arrivals = _native.Arrivals(self._checkpoint, ranges, slots, size, is_direct)
        allowed = part_bytes * choice.other_s_a_byte * _TOO_SLOW
        transfer = Transfer(ranks, arrivals, own, slots, count=len(parts), allowed_s=allowed)
        return transfer, arrivals

    def end(self, *, failed: bool = False) -> None:
        """End it, before the ranks communicate again; once is enough.

        Args:
            failed: whether this rank's load has failed.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            try:
                transfer.end(failed=failed)
            finally:
                self._checkpoint.take_from(None)
            _log.debug("read %d bytes for this rank and others", transfer.read_bytes)


class SharedLoad:
    """What the ranks share of a load that may fail on some before they know what they read."""

    def __init__(self, ranks: Group, config: str, *, apart: bool = False) -> None:
        """Store what `Sharing` needs; nothing is sent."""
        self._ranks = ranks
        self._config = config
        self._apart = apart
        self._sharing: Sharing | None = None
        self._is_chosen = ranks.size == 1 or not may_share(config)

    def planned(self, checkpoint: _native.Checkpoint, passes: Iterable[InFiles]) -> None:
        """Begin to share what this rank's passes read; not again, if the load starts again."""
        if self._is_chosen:
            self.end(failed=True)
            return
        needs: Needs | None = None
        if may_pay(self._ranks, checkpoint, self._config):
            needs = Needs.of(self._ranks, checkpoint, passes, self._config)
        self._choose(checkpoint, needs)

    def end(self, *, failed: bool) -> None:
        """End sharing, before the ranks communicate again. All ranks call it, once or more often.

        Args:
            failed: whether this rank's load has failed.
        """
        if not self._is_chosen:
            self._choose(None, None)
        if self._sharing is not None:
            self._sharing.end(failed=failed)

    def _choose(self, checkpoint: _native.Checkpoint | None, needs: Needs | None) -> None:
        self._is_chosen = True
        stamp = None if checkpoint is None else checkpoint.stamp
        said = self._ranks.gathered((stamp, needs))
        every = [one for _, one in said if one is not None]
        is_same = len({stamp for stamp, _ in said}) == 1
        if is_same and checkpoint is not None and len(every) == self._ranks.size:
            self._sharing = Sharing(self._ranks, checkpoint, every, self._config, apart=self._apart)


class _Choice:
    """What the ranks of a load do, all alike but for the page cache of each host."""

    def __init__(self, ranks: Group, checkpoint: _native.Checkpoint, needs: list[Needs]) -> None:
        """Add up what the ranks need; nothing is sent."""
        self._files = _native.files_of(checkpoint)
        self._sizes = _sizes(checkpoint)
        self._unit_bytes = needs[0].unit_bytes
        self._places = list(_places(self._sizes, self._unit_bytes))
        self._needs = needs
        self._units = torch.stack([_summed(one, len(self._places)) for one in needs])
        """How much of each unit each rank reads."""
        self._hosts = [one.host for one in needs]
        self.other_s_a_byte = float("inf")
        """Seconds that the best other way takes for a byte."""
        self.otherwise_by_host = False
        """Whether this rank's host reads through its page cache what is not sent."""
        self.way = "direct"
        """Or "host": through its page cache; or "group": sent by the rank that reads it."""
        self._why_not = _why_not_sent(ranks, checkpoint)

    def choose(self, ranks: Group, share: str, *, apart: bool) -> None:
        """Choose the way. All ranks call it."""
        own = self._hosts[ranks.rank]
        if share == "auto":
            self.way = self._measured(ranks, own, may_send=not apart and self._why_not is None)
        elif share == "host" or apart or self._why_not is not None:
            if share == "group" and self._why_not is not None:
                _log.warning("share_reads='group': %s; the ranks of a host share", self._why_not)
            needed, once = self._bytes(own)
            self.way = "host" if needed >= _RANKS_MIN * once else "direct"
        elif bool(self._is_shared().any()):
            self.way = "group"

    def parts(self, part_bytes: int) -> list[Part]:
        """Return the parts that several ranks take, in the order in which loads take them."""
        columns = (self._units >= _SHARE_MIN).T.contiguous()
        takers_of: dict[bytes, tuple[int, ...]] = {}
        parts = []
        for unit in self._in_order():
            column = columns[unit.number].numpy().tobytes()
            if column not in takers_of:
                takers_of[column] = tuple(n for n, takes in enumerate(column) if takes)
            takers = takers_of[column]
            cuts = _sent_parts.cut(unit.begin, unit.end, part_bytes)
            parts += [Part(unit.file, begin, end, takers) for begin, end in cuts]
        return parts

    def _in_order(self) -> Iterator[_Unit]:
        """Yield the shared units by pass, file and offset; files of several directories in turn."""
        directories = self._needs[0].directories  # alike on all ranks
        of_pass: dict[int, list[_Unit]] = {}
        first = self._first_passes()
        for number in self._is_shared().nonzero().flatten().tolist():
            of_pass.setdefault(first[number], []).append(self._places[number])
        for _, units in sorted(of_pass.items()):
            for turn in _native.in_turns([directories[unit.file] for unit in units]):
                yield units[turn]

    def _first_passes(self) -> list[int]:
        """Return for each unit the first pass in which a rank reads it."""
        first = torch.zeros(len(self._places), dtype=torch.int64, device="cpu")
        is_read = torch.zeros(len(self._places), dtype=torch.bool, device="cpu")
        for number in range(max(len(one.units) for one in self._needs)):
            read = [_tensor(one.units[number]) for one in self._needs if one.units[number]]
            if read:
                now = torch.stack(read).bool().any(0)
                first[now & ~is_read] = number
                is_read |= now
        found: list[int] = first.tolist()
        return found

    def _is_shared(self) -> torch.Tensor:
        """Return which units it pays to read once for several ranks."""
        takes = self._units >= _SHARE_MIN
        taken = torch.where(takes, self._units, 0).sum(0)
        return (takes.sum(0) >= 2) & (taken >= _RANKS_MIN * taken.clamp(max=_WHOLE))

    def _measured(self, ranks: Group, own: str, *, may_send: bool) -> str:
        """Return what the ranks expect to be fastest, by a sample of the disk and of the group."""
        shared = {host: self._shared(host) for host in sorted(set(self._hosts))}
        may_send = may_send and len(shared) > 1 and self._shared(None) >= _RANKS_MIN
        if not may_send and all(factor < _RANKS_MIN for factor in shared.values()):
            return "direct"
        files = ((nbytes, path) for _, path, nbytes, is_here in self._files if is_here)
        largest = max(files, default=(0, ""))
        samples = ranks.gathered(_sample(*largest, ranks.rank))
        rates = {host: self._disk_rate(host, samples) for host in shared}
        way, expected = "direct", 0.0
        for host, rate in rates.items():
            if rate is None:
                return "direct"
            copied = _COPIED_A_CORE * min(self._hosts.count(host), _cores(self._needs, host))
            is_slow = shared[host] >= _RANKS_MIN and rate < copied * (1 - 1 / shared[host])
            needed, once = self._bytes(host)
            expected = max(expected, (once if is_slow else needed) / rate)
            if is_slow and host == own:
                way = "host"
        if may_send:
            worse = max(later / (took or 1) for took, later in filter(None, samples))
            rate = sum(filter(None, rates.values())) / worse
            if self._pays_to_send(ranks, expected * worse, rate):
                self.otherwise_by_host = way == "host"
                return "group"
        return way

    def _pays_to_send(self, ranks: Group, expected: float, rate: float) -> bool:
        """Return whether sending takes less than the seconds that any other way is expected to."""
        _, once = self._bytes(None)
        self.other_s_a_byte = expected / once
        on_disk = once / rate
        if on_disk > _GAIN * expected:
            return False
        needed = float(self._units.sum(1).max()) * self._unit_bytes / _WHOLE
        received = max(needed - once / ranks.size, 0)  # it reads its share itself
        sent_s = received / (_sent_parts.measured_rate(ranks, _SENT_BYTES) or 1)
        hosts = set(self._hosts)
        cores = min(_cores(self._needs, host) / self._hosts.count(host) for host in hosts)
        shared_s = max(on_disk, sent_s) if cores >= _CORES_MIN else on_disk + sent_s
        _log.debug("to send takes %.2f s, to share %.2f s", sent_s, shared_s)
        _log.debug("the best other way takes %.2f s", expected)
        return shared_s < _GAIN * expected

    def _disk_rate(self, host: str, samples: list[_Sample | None]) -> float | None:
        """Return the bytes per second that a host's ranks read together; None if not known."""
        here = [took for took, one in zip(samples, self._hosts, strict=True) if one == host]
        seconds = [sample.seconds for sample in here if sample is not None]
        if len(seconds) < len(here):
            return None
        # The mean: one may have waited for a core, not for the disk.
        return len(here) * _READS * _READ_BYTES / statistics.mean(seconds)

    def _bytes(self, host: str | None) -> tuple[float, float]:
        """Return the bytes that a host's ranks need, all ranks for None; and each byte once."""
        here = [n for n, one in enumerate(self._hosts) if host == one]
        taken = (self._units if host is None else self._units[here]).sum(0)
        scale = self._unit_bytes / _WHOLE
        return float(taken.sum()) * scale, float(taken.clamp(max=_WHOLE).sum()) * scale

    def _shared(self, host: str | None) -> float:
        """Return how many ranks of a host, or of all, need each byte on average; 0 for little."""
        needed, once = self._bytes(host)
        return needed / once if once >= max(_SHARED_BYTES_MIN, 1) else 0


def _why_not_sent(ranks: Group, checkpoint: _native.Checkpoint) -> str | None:
    """Return why the ranks may not send each other what they read; None if they may."""
    if checkpoint.stamp is None:
        return (
            "files of other programs have no checksums, so no rank could tell whether those of "
            "another host are the same"
        )
    if not ranks.may_send:
        return "this PyTorch makes no process group of ringstow's own"
    return None


def _bound_to() -> int:
    """Return the cores that this process is bound to, as bits; all where no system call says."""
    bound = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return sum(1 << core for core in bound(0))


def _cores(needs: list[Needs], host: str) -> int:
    """Return how many cores the ranks of a host may use together."""
    here = [one for one in needs if one.host == host]
    bound_to = functools.reduce(operator.or_, [one.bound_to for one in here]).bit_count()
    shares = [one.cores for one in here if one.cores < one.bound_to.bit_count()]
    return min([bound_to, *shares])


def _sizes(checkpoint: _native.Checkpoint) -> list[int]:
    return [nbytes for _, _, nbytes, _ in _native.files_of(checkpoint)]


def _unit_bytes(sizes: list[int], ranks: int) -> int:
    """Return the bytes of a unit: of whole parts, which are sent."""
    most = max(min(_UNITS_OF_ALL_MAX // ranks, _UNITS_MAX), _UNITS_MIN)
    return max(-(-sum(sizes) // most // _UNIT_BYTES_MIN), 1) * _UNIT_BYTES_MIN


def _units(sizes: list[int], unit_bytes: int, ranges: Iterable[tuple[int, int, int]]) -> bytes:
    """Return how much of each unit these ranges are; nothing for no range."""
    firsts = [0, *itertools.accumulate(-(-nbytes // unit_bytes) for nbytes in sizes)]
    read = [0] * firsts[-1]
    for file, begin, end in ranges:
        for unit in range(begin // unit_bytes, -(-end // unit_bytes)):
            part = min(end, (unit + 1) * unit_bytes) - max(begin, unit * unit_bytes)
            read[firsts[file] + unit] += part
    if not any(read):
        return b""
    shares = zip(read, _places(sizes, unit_bytes), strict=True)
    return bytes(min(-(-n * _WHOLE // (unit.end - unit.begin)), _WHOLE) for n, unit in shares)


def _places(sizes: list[int], unit_bytes: int) -> Iterator[_Unit]:
    number = itertools.count()
    for file, nbytes in enumerate(sizes):
        for begin in range(0, nbytes, unit_bytes):
            yield _Unit(next(number), file, begin, min(begin + unit_bytes, nbytes))


def _summed(needs: Needs, units: int) -> torch.Tensor:
    """Return how much of each unit a rank reads in all passes."""
    read = torch.zeros(units, dtype=torch.int64, device="cpu")
    for one in filter(None, needs.units):
        read += _tensor(one)
    return read.clamp(max=_WHOLE).to(torch.uint8)  # a row for each rank


def _tensor(units: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(units), dtype=torch.uint8)


class _Sample(NamedTuple):
    """What a sample of the disk took."""

    seconds: float
    steady_s: float
    """If all of it took as long as the second half: some disks are fast for a moment."""


def _sample(nbytes: int, path: str, rank: int) -> _Sample | None:
    """Return the seconds that reads past the page cache take; None if they are not possible.

    All ranks read at about the same time, each at other places.
    """
    places = nbytes // _READ_BYTES
    if not places:
        return None
    try:
        with (
            _files.reading_past_cache(path) as file,
            mmap.mmap(-1, _READS * _READ_BYTES) as memory,  # aligned, as O_DIRECT wants it
        ):
            memory[::4096] = bytes(len(memory) // 4096)  # page faults before the clock runs
            half = _READ_BYTES // 2
            parts = [memoryview(memory)[n * half :][:half] for n in range(2 * _READS)]
            ready = threading.Barrier(_READS, timeout=1)  # a thread may not start

            def read(number: int) -> tuple[float, float, float]:
                at = (rank * _READS + number) % places * _READ_BYTES
                ready.wait()  # to start threads is not the disk's time
                begun = time.monotonic()
                os.preadv(file.fileno(), [parts[2 * number]], at)
                between = time.monotonic()
                os.preadv(file.fileno(), [parts[2 * number + 1]], at + half)
                return begun, between, time.monotonic()

            try:
                with ThreadPoolExecutor(_READS, "ringstow-sample") as threads:
                    begun, between, ended = zip(*threads.map(read, range(_READS)), strict=True)
                seconds = max(ended) - min(begun)
                return _Sample(seconds, max(2 * (max(ended) - max(between)), seconds))
            finally:
                for part in parts:
                    part.release()
    except Exception:  # the others must not wait for this rank
        return None
