"""What torch's storage says of a save and a load beside the tensors: their ids, DCP's version."""

from __future__ import annotations

import os
import uuid

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from ringstow.dcp import _paths

# A manifest ends in `,"crc32":"xxxxxxxx"}` and a newline: the checksum of all the rest.
_SEAL_LEN = 21
_NAMESPACE = uuid.UUID("6f1f6c0e-5f0a-4c1e-9d53-7d1d0b2a8f11")


def fresh() -> str:
    """Return an id that nothing else has."""
    return str(uuid.uuid4())


def of(stamp: str | None) -> str | None:
    """Return the id of the save that a checkpoint is of, from its manifest's stamp."""
    return None if stamp is None else str(uuid.uuid5(_NAMESPACE, stamp))


def committed(path: str) -> str | None:
    """Return the same of the checkpoint that was just committed at a path."""
    try:
        with open(os.path.join(path, _paths.MANIFEST), "rb") as file:
            nbytes = file.seek(-_SEAL_LEN, os.SEEK_END) + _SEAL_LEN
            seal = file.read(_SEAL_LEN).decode().rstrip()
    except (OSError, ValueError):  # already replaced or removed again
        return None
    return of(f"{nbytes} bytes{seal}")


def set_version(metadata: Metadata) -> None:
    """Note the version of DCP's format, as torch's writer does; an older torch has none."""
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version
