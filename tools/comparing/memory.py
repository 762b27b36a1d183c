"""Fill the page cache, as on a machine that has been in use for a while.

On a physical machine, unused memory is available at once. A virtual machine's host may have taken
it back, and returns it slowly, at the first touch. The measurements then depend on earlier ones: a
save through the page cache leaves memory behind for the load that follows. On a machine that reads
training data, the page cache holds all memory and the kernel reclaims it from there. This gives
every library the same start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comparing.directories import file_system, fresh_directory
from comparing.processes import CompareFailed
from comparing.usage import meminfo_bytes

READ_BYTES = 1 << 20
READS = 128  # between two checks of how much is free
FREE_SHARE_MAX = 1 / 64  # of memory: about twice as much as the kernel keeps free by itself
# Reading as many bytes as memory has may not suffice: near the end the kernel also reclaims pages.
TIMES_MAX = 8


class PageCache:
    """Reads a sparse file, twice as long as memory, until the page cache holds all memory.

    The open file's offset is the position to continue from, which the kernel evicted first.
    Processes that inherit the descriptor share the offset.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def fill(self) -> None:
        """Fill the cache until hardly any memory is free.

        Call it just before a measurement: within seconds the host takes back even the little
        memory that the kernel keeps free.

        Raises:
            CompareFailed: memory stays free, for example because a cgroup limits the cache.
        """
        memory = meminfo_bytes("MemTotal")
        for _ in range(TIMES_MAX * memory // (READS * READ_BYTES)):
            self._read()
            free = meminfo_bytes("MemFree")
            if free < memory * FREE_SHARE_MAX:
                return
        raise CompareFailed(
            f"the page cache leaves {free >> 20} MiB of memory free; a cgroup may limit it. "
            "Run without --used-memory"
        )

    def _read(self) -> None:
        threads = os.cpu_count() or 1
        readers = [
            threading.Thread(target=self._read_share, args=(threads,)) for _ in range(threads)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    def _read_share(self, shares: int) -> None:
        buffer = bytearray(READ_BYTES)
        for _ in range(-(-READS // shares)):
            end = os.lseek(self.descriptor, READ_BYTES, os.SEEK_CUR)
            os.preadv(self.descriptor, [buffer], (end - READ_BYTES) % self._size)


@contextmanager
def page_cache(parent: Path) -> Iterator[PageCache]:
    """Create the file to fill the page cache with, in a temporary directory.

    Raises:
        CompareFailed: the directory is in memory (tmpfs), or the cache can't be filled.
    """
    if file_system(parent) == "tmpfs":
        raise CompareFailed(f"{parent} is in memory: --used-memory needs files on a disk")
    with fresh_directory(parent) as directory:
        (directory / "without-blocks").touch()
        size = 2 * meminfo_bytes("MemTotal") // READ_BYTES * READ_BYTES
        os.truncate(directory / "without-blocks", size)
        with open(directory / "without-blocks", "rb") as file:
            cache = PageCache(file.fileno())
            cache.fill()  # fails early if the cache can't be filled
            yield cache
