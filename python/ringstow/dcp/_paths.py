"""What is a path, and where a checkpoint's parts lie. No I/O."""

from __future__ import annotations

import os
from typing import Any

from ringstow._errors import InvalidStateError
from ringstow._paths import StrPath, absolute

MANIFEST = "manifest.json"


def is_path(checkpoint_id: Any) -> bool:
    """Tell whether a checkpoint's id is a path; a URL is not."""
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    text = os.fspath(checkpoint_id)
    return isinstance(text, str) and bool(text) and "://" not in text and "\0" not in text


def directory(checkpoint_id: StrPath) -> str:
    """Return the path from the root.

    Raises:
        InvalidStateError: the id is no path.
    """
    if not is_path(checkpoint_id):
        raise InvalidStateError(
            f"{checkpoint_id!r} is no path in the file system: checkpoints are saved to and loaded "
            "from directories only"
        )
    return absolute(checkpoint_id)


def of_rank(path: str, rank: int) -> str:
    """Return the directory of a rank that saves without collectives, as a checkpoint of its own."""
    return os.path.join(path, f"rank{rank:05}")
