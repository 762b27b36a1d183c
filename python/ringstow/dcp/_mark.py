"""The file ``.metadata``, for programs that look whether it is there. It is never read here.

A checkpoint is what its ``manifest.json`` says; this file comes after it and means nothing. Torch's
own reader, which unpickles it, is told whose checkpoint it has before it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
from typing import Any, NoReturn

from ringstow._errors import UnsupportedError

NAME = ".metadata"

_log = logging.getLogger("ringstow")


class _Mark:
    """Pickles to a call of `refuse`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> NoReturn:
    """Tell torch's reader that it can't read this checkpoint.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "this is a checkpoint of ringstow's, which torch's FileSystemReader can't read: load it "
        "with ringstow.dcp.StorageReader, or call ringstow.dcp.use_by_default() first"
    )


def write(path: str) -> None:
    """Write the mark of a checkpoint that is committed; a failure is logged only."""
    target = os.path.join(path, NAME)
    temporary = f"{target}.tmp"
    try:
        # A new file, whatever has the name: a link would lead elsewhere.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            pickle.dump(_Mark(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        _log.warning("%s is committed, but without %s: %s", path, NAME, error)


def _sync(directory: str) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such operation needs none
            raise
    finally:
        os.close(opened)
