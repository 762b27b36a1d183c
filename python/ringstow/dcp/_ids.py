"""The ids of saves and loads, as torch's storage has them."""

from __future__ import annotations

import os
import uuid

from ringstow.dcp import _paths

# A manifest ends in `,"crc32":"xxxxxxxx"}` and a newline: the checksum of all before it.
_TRAILER_LEN = 21
_NAMESPACE = uuid.UUID("6f1f6c0e-5f0a-4c1e-9d53-7d1d0b2a8f11")


def fresh() -> str:
    """Return a new id."""
    return str(uuid.uuid4())


def of(fingerprint: str | None) -> str | None:
    """Return the id of the save that made a checkpoint, from its manifest's fingerprint."""
    return None if fingerprint is None else str(uuid.uuid5(_NAMESPACE, fingerprint))


def committed(path: str) -> str | None:
    """Return the id of the save that has just committed a checkpoint at a path."""
    try:
        with open(os.path.join(path, _paths.MANIFEST), "rb") as file:
            nbytes = file.seek(-_TRAILER_LEN, os.SEEK_END) + _TRAILER_LEN
            trailer = file.read(_TRAILER_LEN).decode().rstrip()
    except (OSError, ValueError):  # replaced or removed already
        return None
    return of(f"{nbytes} bytes{trailer}")
