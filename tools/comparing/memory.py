"""Memory as a machine has it that has been in use for a while.

Memory that nothing uses is at hand on a machine of one's own, while a virtual machine's host may
have taken it back, and gives it again slowly, at the first touch. Who waits for that depends on
what ran before: a save through the page cache leaves memory behind for the load that follows. On a
machine that reads its training data the page cache has all memory, and whoever asks for some gets
what the kernel lets go of there: the same for all.
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
READS = 128  # between two looks at how much is free
FREE_SHARE_MAX = 1 / 64  # of memory: about twice what the kernel keeps free by itself
# As long as memory once may not do: near its end the kernel reclaims as well as it takes.
TIMES_MAX = 8


class PageCache:
    """Reads a file without blocks, twice as long as memory, until the page cache has all memory.

    Where to read on, at what the kernel let go of first, is the open file's offset: processes that
    inherit the descriptor share it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def fill(self) -> None:
        """Returns when hardly any memory is free, since the cache has it.

        To be called just before a measurement: what little the kernel keeps free, the host takes
        back within seconds.

        Raises:
            CompareFailed: memory stays free, as where a cgroup limits the cache.
        """
        memory = meminfo_bytes("MemTotal")
        for _ in range(TIMES_MAX * memory // (READS * READ_BYTES)):
            self._read()
            free = meminfo_bytes("MemFree")
            if free < memory * FREE_SHARE_MAX:
                return
        raise CompareFailed(
            f"the page cache leaves {free >> 20} MiB of memory free; is it limited, by a cgroup? "
            "Leave --used-memory out"
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
    """The file to fill the page cache with, in a directory of its own, gone at the end.

    Raises:
        CompareFailed: the directory is in memory, where nothing is read into the cache; or the
            cache can't be filled.
    """
    if file_system(parent) == "tmpfs":
        raise CompareFailed(f"{parent} is in memory: --used-memory needs files on a disk")
    with fresh_directory(parent) as directory:
        (directory / "without-blocks").touch()
        size = 2 * meminfo_bytes("MemTotal") // READ_BYTES * READ_BYTES
        os.truncate(directory / "without-blocks", size)
        with open(directory / "without-blocks", "rb") as file:
            cache = PageCache(file.fileno())
            cache.fill()  # fails at once, if it can't
            yield cache
