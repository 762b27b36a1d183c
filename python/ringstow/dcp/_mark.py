"""The file ``.metadata``, for programs that look whether it is there. It is never read here.

A checkpoint is what its ``manifest.json`` says; this file comes after it and means nothing. Torch's
own reader, which unpickles it, is told whose checkpoint it has before it.
"""

from __future__ import annotations

import contextlib
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
        with open(temporary, "wb") as file:
            pickle.dump(_Mark(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        _log.warning("%s is committed, but without %s: %s", path, NAME, error)
