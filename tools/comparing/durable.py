"""fsync for libraries that leave it out, and files made cold again, with proof."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Every file under `path`, then every directory from the inside out, then the one `path` is in:
    what a save must do to survive a power cut."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))
    fsync_path(path.parent)


def files_under(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def forget(directory: Path) -> None:
    """Has the page cache let go of these files, which are all on disk."""
    for file in files_under(directory):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def drop_caches(directory: Path, *, all_files: bool = True) -> None:
    """Makes the next read of these files a read of the disk; of all others too, where allowed."""
    os.sync()
    forget(directory)
    if all_files and os.geteuid() == 0 and os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def cached_bytes(directory: Path) -> int:
    """How much of these files the page cache still holds, by mincore."""
    return sum(cached_bytes_of(file) for file in files_under(directory))


def cached_bytes_of(file: Path) -> int:
    size = file.stat().st_size
    if size == 0:
        return 0
    pages = (ctypes.c_ubyte * -(-size // PAGE_BYTES))()
    library = ctypes.CDLL(None, use_errno=True)
    with (
        open(file, "rb") as opened,
        mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped,
    ):
        # ctypes takes an address only from what could be written: a private mapping that nobody is.
        first = ctypes.c_char.from_buffer(mapped)
        failed = library.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
        )
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
    return sum(page & 1 for page in pages) * PAGE_BYTES
