"""Which ranks of a host need the same bytes of a checkpoint: the disk then reads these once.

Ranks of a host share its page cache. If several need the same bytes, and the disk is slower than
copies, they read through it: one rank's read fills it, the others copy. Otherwise each rank reads
past it, straight into its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _native
from ringstow._core import _files
from ringstow._core._config import Config, given
from ringstow._ranks._group import Group

if TYPE_CHECKING:
    from ringstow.distributed._node_fetch import Range

# Units that a rank's needs are counted in: few enough for a message, each a block or more.
_UNITS_MAX = 8192
_UNIT_BYTES_MIN = 4 << 20
# All of a unit: of slices of a tensor, several ranks need parts of one unit, and no byte twice.
_WHOLE = 255
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


class Needs(NamedTuple):
    """What one rank is about to read."""

    host: str
    units: bytes
    """How much of each unit of the checkpoint's files it reads, up to `_WHOLE`."""
    unit_bytes: int


def may_pay(ranks: Group, checkpoint: _native.Checkpoint) -> bool:
    """Return whether ranks are to compare what they need; all of them return the same."""
    total = sum(nbytes for _, _, nbytes, _ in _native.files_of(checkpoint))
    return ranks.size > 1 and total >= _SHARED_BYTES_MIN


def needs_of(checkpoint: _native.Checkpoint, ranges: Iterable[Range]) -> Needs:
    """Return the needs of a rank that reads these ranges of a checkpoint's files."""
    sizes = [nbytes for _, _, nbytes, _ in _native.files_of(checkpoint)]
    unit_bytes = max(_UNIT_BYTES_MIN, -(-sum(sizes) // _UNITS_MAX))
    begins = [0, *itertools.accumulate(-(-nbytes // unit_bytes) for nbytes in sizes)]
    read = [0] * begins[-1]
    for file, begin, end in ranges:
        for unit in range(begin // unit_bytes, -(-end // unit_bytes)):
            part = min(end, (unit + 1) * unit_bytes) - max(begin, unit * unit_bytes)
            read[begins[file] + unit] += part
    shares = bytes(min(-(-nbytes * _WHOLE // unit_bytes), _WHOLE) for nbytes in read)
    return Needs(_native.boot_id(), shares, unit_bytes)


def pays(ranks: Group, checkpoint: _native.Checkpoint, needs: list[Needs]) -> bool:
    """Return whether this rank is to read through the page cache. All ranks call it.

    Args:
        ranks: the ranks of the load.
        checkpoint: the checkpoint that they read.
        needs: the needs of each rank.
    """
    shared = {one.host: _shared(one.host, needs) for one in needs}
    if all(factor < _RANKS_MIN for factor in shared.values()):
        return False
    files = [(nbytes, path) for _, path, nbytes, is_here in _native.files_of(checkpoint) if is_here]
    host = needs[ranks.rank].host
    return _is_slow(ranks, host, shared[host], max(files, default=(0, "")))


def by_all(ranks: Group, path: str, config: Config | None) -> Config | None:
    """Return the settings of a load in which every rank reads all of a checkpoint.

    All ranks call it.
    """
    if ranks.size == 1:
        return config
    host, settings = _native.boot_id(), given(config)
    hosts = ranks.gathered(host)
    files: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        files = [(one.stat().st_size, one.path) for one in os.scandir(path) if one.is_file()]
    is_large = sum(nbytes for nbytes, _ in files) >= _SHARED_BYTES_MIN
    largest = max(files) if is_large else (0, "")
    is_slow = _is_slow(ranks, host, hosts.count(host), largest)
    return (
        dataclasses.replace(settings, direct="off")
        if is_slow and settings.direct == "auto"
        else config
    )


def _is_slow(ranks: Group, host: str, shared: float, file: tuple[int, str]) -> bool:
    """Return whether this host's disk is slower than copies in memory.

    Args:
        ranks: the ranks of the load, which all call this.
        host: this rank's.
        shared: how many of its ranks need each byte, on average.
        file: bytes and path of a file to read a sample of.
    """
    said = ranks.gathered((host, _sample(*file, ranks.rank)))
    seconds = [one for where, one in said if where == host]
    if shared < _RANKS_MIN or None in seconds:
        return False
    read = len(seconds) * _READS * _READ_BYTES / max(filter(None, seconds), default=1)
    copied = _COPIED_A_CORE * min(len(seconds), os.cpu_count() or 1)
    return read < copied * (1 - 1 / shared)


def _shared(host: str, needs: Iterable[Needs]) -> float:
    """Return how many ranks of a host need each byte, on average; 0 for little."""
    here = [one for one in needs if one.host == host]
    all_read: list[int] = [sum(shares) for shares in zip(*(one.units for one in here), strict=True)]
    once = sum(min(share, _WHOLE) for share in all_read)
    if once * here[0].unit_bytes < _SHARED_BYTES_MIN * _WHOLE:
        return 0
    return sum(all_read) / once


def _sample(nbytes: int, path: str, rank: int) -> float | None:
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
            parts = [memoryview(memory)[n * _READ_BYTES :][:_READ_BYTES] for n in range(_READS)]

            def read(number: int) -> None:
                place = (rank * _READS + number) % places
                os.preadv(file.fileno(), [parts[number]], place * _READ_BYTES)

            try:
                with ThreadPoolExecutor(_READS, "ringstow-sample") as threads:
                    begun = time.monotonic()
                    list(threads.map(read, range(_READS)))
                    return time.monotonic() - begun
            finally:
                for part in parts:
                    part.release()
    except OSError:
        return None
