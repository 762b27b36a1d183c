"""Checkpoint ids and paths, the directory of a rank's part, and the ids of saves and loads."""

from __future__ import annotations

import os
import uuid
from typing import Any

from ringstow._core import _files
from ringstow._core._arguments import StrPath, absolute, brief, object_url
from ringstow._core._errors import InvalidStateError

MANIFEST = "manifest.json"
# A manifest ends in `,"crc32":"xxxxxxxx"}` and a newline: the checksum of all before it.
_TRAILER_LEN = 21
_NAMESPACE = uuid.UUID("6f1f6c0e-5f0a-4c1e-9d53-7d1d0b2a8f11")


def is_path(checkpoint_id: Any) -> bool:
    """Return whether a checkpoint's id is a path in the file system, not a URL."""
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
            f"{brief(checkpoint_id)} is not a path in the file system: give the directory to save "
            "to or load from"
        )
    return absolute(checkpoint_id)


def is_object(checkpoint_id: Any) -> bool:
    """Return whether a checkpoint's id is the URL of an object store."""
    return isinstance(checkpoint_id, (str, os.PathLike)) and object_url(checkpoint_id) is not None


def to_read(checkpoint_id: StrPath) -> str:
    """Return the absolute path or the URL of a checkpoint to read.

    Raises:
        InvalidStateError: the id is neither a path nor a URL of a store.
    """
    return object_url(checkpoint_id) or directory(checkpoint_id)


def of_rank(path: str, rank: int) -> str:
    """Return the directory of a rank's part, if each rank saves by itself."""
    return os.path.join(path, f"rank{rank:05}")


def fresh_id() -> str:
    """Return a new id of a save or a load, in torch's format."""
    return str(uuid.uuid4())


def id_of(fingerprint: str | None) -> str | None:
    """Return the id of the save that made a checkpoint, from its manifest's fingerprint."""
    return None if fingerprint is None else str(uuid.uuid5(_NAMESPACE, fingerprint))


def committed_id(path: str) -> str | None:
    """Return the id of the save that has just committed a checkpoint at a path."""
    try:
        with _files.reading(os.path.join(path, MANIFEST)) as file:
            nbytes = file.seek(-_TRAILER_LEN, os.SEEK_END) + _TRAILER_LEN
            trailer = file.read(_TRAILER_LEN).decode().rstrip()
    except (OSError, ValueError):  # replaced or removed already
        return None
    return id_of(f"{nbytes} bytes{trailer}")
