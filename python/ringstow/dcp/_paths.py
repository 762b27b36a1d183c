"""Which ids are paths, and where a rank's part of a checkpoint is. No I/O."""

from __future__ import annotations

import os
from typing import Any

from ringstow._arguments import StrPath, absolute
from ringstow._errors import InvalidStateError

MANIFEST = "manifest.json"


def is_path(checkpoint_id: Any) -> bool:
    """Tell whether a checkpoint's id is a path in the file system; a URL is not."""
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    text = os.fspath(checkpoint_id)
    return isinstance(text, str) and bool(text) and "://" not in text and "\0" not in text


def directory(checkpoint_id: StrPath) -> str:
    """Return the absolute path.

    Raises:
        InvalidStateError: the id is not a path in the file system.
    """
    if not is_path(checkpoint_id):
        raise InvalidStateError(
            f"{checkpoint_id!r} is not a path in the file system: give the directory to save to or "
            "load from"
        )
    return absolute(checkpoint_id)


def of_rank(path: str, rank: int) -> str:
    """Return the directory of a rank's part, of ranks that save each by itself."""
    return os.path.join(path, f"rank{rank:05}")
