"""Retries on a host that sees another host's save late.

A network file system may show an old directory for a while. Only there, and for a limited time, an
operation that failed on a missing file is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from ringstow import _native
from ringstow._core._errors import MissingFilesError

SEEN_S = _native.SEEN_S
"""How long to wait; the native side waits as long for the files of a save's ranks."""
POLL_S = _native.POLL_S
OLD_S = 600.0
"""Every host sees a checkpoint that was committed longer ago: missing files are lost.

More than `SEEN_S`, since the server's clock, which dates files, may differ.
"""

_MANIFEST = "manifest.json"

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")


def lacks_files(error: Exception) -> bool:
    """Return whether a checkpoint exists whose files are missing or differ from its list."""
    is_stale = isinstance(error, OSError) and error.errno == errno.ESTALE
    return is_stale or isinstance(error, MissingFilesError)


def is_old(path: str) -> bool:
    """Return whether a checkpoint was committed so long ago that every host sees all files."""
    try:
        committed = os.stat(os.path.join(path, _MANIFEST)).st_mtime
    except OSError:
        return False
    return abs(time.time() - committed) > OLD_S


def opened(
    path: str, attempt: Callable[[], _T], is_late: Callable[[Exception], bool] = lacks_files
) -> _T:
    """Attempt to open a checkpoint, and return the result.

    If other hosts may use the file system, try again while the failure may come from a delayed
    view.

    Args:
        path: the checkpoint's directory.
        attempt: opens the checkpoint.
        is_late: whether a later attempt may succeed.

    Raises:
        Exception: the last attempt's error.
    """
    try:
        return attempt()
    except Exception as error:
        if not is_late(error) or is_old(path):
            raise
        system = _native.shared_file_system(path)
        if system is None:
            raise
        _log.warning(
            "waiting up to %.0f s for what another host may have saved: %s is on %s, and %s",
            SEEN_S,
            path,
            system,
            error,
        )
    until = time.monotonic() + SEEN_S
    while True:
        time.sleep(POLL_S)
        look_again(path)
        try:
            return attempt()
        except Exception as error:
            if time.monotonic() >= until or not is_late(error):
                raise


def look_again(path: str) -> None:
    """List a path and its parent, so that a network file system finds new names there."""
    for directory in (os.path.dirname(path), path):
        with contextlib.suppress(OSError):
            os.listdir(directory)
