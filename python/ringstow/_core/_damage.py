"""Decides which load failures are damage, after which an earlier checkpoint may be intact."""

from __future__ import annotations

import errno
from typing import Literal

from ringstow._core._errors import CorruptCheckpointError, FormatError

OnCorrupt = Literal["raise", "previous"]
"""How a resume treats damage."""

# The system's errors for bad sectors and for damage that the file system has detected.
_BAD_MEDIUM = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)


def is_damage(error: BaseException) -> bool:
    """Return whether the error is damage: wrong bytes, or an unreadable medium."""
    if isinstance(error, CorruptCheckpointError | FormatError):
        return True
    return isinstance(error, OSError) and error.errno in _BAD_MEDIUM
