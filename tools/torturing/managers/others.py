"""Other processes beside the training: a second job that must be refused, and a reader."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

import ringstow

from .place import SAVE, Place, label, log_to_stderr
from .rules import Rules

ROUNDS = 6
# Above all numbers of saves, so that the oracle knows none of them.
STRANGE_SAVE = 10**9


def second_job(place: Place, pipe: int) -> None:
    """Try to save into the run of a job that is alive; say how it was refused."""
    log_to_stderr()
    said: dict[str, Any] = {}
    try:
        with place.manager(Rules(last=1)) as manager:
            state = place.shape.state(STRANGE_SAVE, STRANGE_SAVE)
            manager.save(STRANGE_SAVE, state, metrics={SAVE: STRANGE_SAVE})
    except ringstow.BusyError as error:
        said["refused"] = str(error)
    except BaseException:
        said["error"] = traceback.format_exc()
    os.write(pipe, json.dumps(said).encode())


def reader(place: Place, pipe: int) -> None:
    """Restore again and again beside the job; say what was read."""
    log_to_stderr()
    said: dict[str, Any] = {"read": []}
    try:
        # Without the tiers, to which a restore copies.
        manager = place.manager(Rules(), alone=True)
        for _ in range(ROUNDS):
            restored = manager.restore()
            if restored is None:
                said["read"].append(None)
                continue
            found = label(restored.metrics, restored.step)
            found["wrong"] = place.shape.wrong(restored.state, restored.dropped)
            said["read"].append(found)
    except BaseException:
        said["error"] = traceback.format_exc()
    os.write(pipe, json.dumps(said).encode())
