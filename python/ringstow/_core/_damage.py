"""Which failures of a load are damage, after which an earlier checkpoint may be intact."""

from __future__ import annotations

import errno
from typing import Literal

from ringstow._core._errors import CorruptCheckpointError, FormatError

OnCorrupt = Literal["raise", "previous"]
"""What a resume does about damage."""

# What a system reports of bad sectors and of damage that the file system has found itself.
_BAD_MEDIUM = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)


def is_damage(error: BaseException) -> bool:
    """Return whether bytes are not those that were written, or the medium cannot be read."""
    if isinstance(error, CorruptCheckpointError | FormatError):
        return True
    return isinstance(error, OSError) and error.errno in _BAD_MEDIUM
