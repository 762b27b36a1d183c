"""The file ``.metadata``, for programs that look whether it is there. It is never read here.

A checkpoint is what its ``manifest.json`` says; this file comes after it and means nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle

from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"

_log = logging.getLogger("ringstow")


def write(path: str, metadata: Metadata) -> None:
    """Write the mark of a checkpoint that is committed; a failure is logged only."""
    target = os.path.join(path, NAME)
    temporary = f"{target}.tmp"
    try:
        with open(temporary, "wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except Exception as error:  # metadata of a planner of one's own may not even pickle
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        _log.warning("%s is committed, but without %s: %s", path, NAME, error)
