"""Sync files for libraries that do not, and drop files from the page cache, with a check."""

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
    """Sync every file under `path`, then every directory from the inside out, then the parent.

    A save must sync all of these to survive a power cut.
    """
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))
    fsync_path(path.parent)


def files_under(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def forget(directory: Path) -> None:
    """Drop these files from the page cache; they must be synced already."""
    for file in files_under(directory):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def drop_caches(directory: Path, *, all_files: bool = True) -> None:
    """Drop these files from the page cache; as root, with `all_files`, drop the whole cache."""
    os.sync()
    forget(directory)
    if all_files and os.geteuid() == 0 and os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def cached_bytes(directory: Path) -> int:
    """Return how many bytes of these files the page cache still holds, using mincore."""
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
        # ctypes needs a writable buffer to take its address, hence a private copy-on-write mapping.
        first = ctypes.c_char.from_buffer(mapped)
        failed = library.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
        )
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
    return sum(page & 1 for page in pages) * PAGE_BYTES
