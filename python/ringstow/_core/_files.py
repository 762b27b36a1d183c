"""Opens the files of runs and checkpoints, and only regular files.

The package opens every named file with this module (tests/test_file_io.py checks it). Others can
write to a run's directory, so any name may be a FIFO, a socket, a device or a link. This module
never waits for such a file, and never writes through a link:

- Reading follows links, since caches such as Hugging Face's store files as links to blobs.
- Writing creates a new file, or opens a file that is not a link. A new file that is then renamed
  replaces a link, not its target.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO, cast

from ringstow import _native

# Without O_NONBLOCK, opening a FIFO waits for its other end. Regular files ignore the flag.
_NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# The system's errors for O_NOFOLLOW on a link; EMLINK on FreeBSD.
_IS_LINK = (errno.ELOOP, errno.EMLINK)
# The system's errors on a file system that cannot swap two names.
_NO_SWAP = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# The system's errors for a socket, and for writing to a FIFO without a reader.
_NOBODY_THERE = (errno.ENXIO, errno.EOPNOTSUPP)


class OtherKindError(OSError):
    """The path is not a regular file. For a directory, IsADirectoryError is raised."""


def reading(path: str, *, links: bool = True) -> BinaryIO:
    """Open a file to read.

    Args:
        path: the file.
        links: follow a link at the path itself. False for files that only ringstow creates.

    Raises:
        OtherKindError: not a regular file, or a link that must not be followed.
        OSError: the system refused.
    """
    flags = os.O_RDONLY if links else os.O_RDONLY | os.O_NOFOLLOW
    return cast(BinaryIO, os.fdopen(_opened(path, flags), "rb"))


def reading_past_cache(path: str) -> BinaryIO:
    """Open a file to read aligned memory from, unbuffered and past the page cache.

    Raises:
        OSError: not a regular file, or the file system or the system has no such reads.
    """
    past = getattr(os, "O_DIRECT", None)
    if past is None:
        raise OSError(errno.EOPNOTSUPP, "no O_DIRECT on this system", path)
    return cast(BinaryIO, os.fdopen(_opened(path, os.O_RDONLY | past), "rb", buffering=0))


def new(path: str) -> BinaryIO:
    """Create a file to write.

    Raises:
        FileExistsError: the path exists, even as a broken link.
        OSError: the system refused.
    """
    return cast(BinaryIO, os.fdopen(_opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb"))


def fresh(path: str) -> BinaryIO:
    """Create a file to write, replacing any file or link at the path.

    Only for names that ringstow makes itself, such as temporary ones.

    Raises:
        FileExistsError: another process has just created it.
        OSError: the system refused, or a directory has the name.
    """
    clear(path)
    return new(path)


def clear(path: str) -> None:
    """Remove the file or link at a path, if it exists, so that another program can write there.

    Only for names that ringstow makes itself, such as temporary ones.

    Raises:
        OSError: the system refused, or a directory has the name.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def rewriting(path: str) -> BinaryIO:
    """Open an existing file to read and write.

    Raises:
        OtherKindError: not a regular file, or a link.
        OSError: the system refused.
    """
    return cast(BinaryIO, os.fdopen(_opened(path, os.O_RDWR | os.O_NOFOLLOW), "r+b"))


def to_lock(path: str) -> int:
    """Return a descriptor for locking a file or directory.

    Raises:
        OtherKindError: the path is a link.
        OSError: the system refused.
    """
    with _naming_links(path):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | _NEVER_WAIT)


def sync(path: str) -> None:
    """Make a file durable. Does nothing for other kinds of files, which have no bytes on disk.

    Raises:
        OSError: the system refused.
    """
    try:
        file = _opened(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OtherKindError:
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _opened(path: str, flags: int) -> int:
    with _naming_links(path):
        file = os.open(path, flags | _NEVER_WAIT, 0o666)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise _other(path, _OTHERS.get(stat.S_IFMT(mode), "no file"))
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def _naming_links(path: str) -> Iterator[None]:
    """Raise an error that names the kind of file at a path that the system refuses."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_IS_LINK, *_NOBODY_THERE):
            raise
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            raise error from None
        if stat.S_ISLNK(mode) and error.errno in _IS_LINK:
            raise _other(path, "a symbolic link") from None
        if kind := _OTHERS.get(stat.S_IFMT(mode)):
            raise _other(path, kind) from None
        raise


def _other(path: str, kind: str) -> OtherKindError:
    return OtherKindError(
        errno.ENXIO, f"is {kind}, where a regular file is expected: remove it, or move it", path
    )


def take_place(new: str, path: str, old: str) -> None:
    """Rename ``new`` to ``path``, and what was at ``path`` to ``old``.

    If the file system can swap two names, ``path`` always exists. Otherwise it is missing between
    two renames: a kill there leaves the old one under the name ``old``.

    Args:
        new: the file or directory that replaces it.
        path: its new name.
        old: the new name of what is at the path now; must be unused.

    Raises:
        OSError: the system refused. Both still exist, one of them at the path.
    """
    try:
        _native.swap_names(new, path)
    except OSError as error:
        if error.errno not in _NO_SWAP:
            raise
        try:
            os.rename(path, old)
            os.rename(new, path)
        except BaseException:  # also Ctrl-C, which Python raises directly after a call
            if os.path.lexists(old) and not os.path.lexists(path):
                os.rename(old, path)
            raise
    else:
        os.rename(new, old)
