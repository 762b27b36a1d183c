"""Chooses the checkpoints of a Trainer to remove, by the Trainer's own rules."""

from __future__ import annotations

import os
import re

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ringstow.integrations import _rename_when_complete

_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def stale(newest: str, limit: int | None, best: str | None) -> list[str]:
    """Return the checkpoints to remove: those over the limit, in the Trainer's order."""
    if limit is None or limit <= 0:
        return []
    # The Trainer would also remove a user's copy, such as checkpoint-500-backup.
    found = [
        path
        for path in sort_checkpoints(os.path.dirname(newest), use_mtime=True)
        if _NUMBERED.fullmatch(os.path.basename(path))
    ]
    stay = {newest} if best is None else {newest, best}
    others = [path for path in found if os.path.abspath(path) not in stay]
    return others[: max(0, len(found) - max(limit, len(stay)))]


def remove_others(best: str) -> None:
    """Remove all checkpoints beside the given one."""
    run, name = os.path.split(os.path.abspath(best))
    for other in os.listdir(run):
        if _NUMBERED.fullmatch(other) and other != name:
            _rename_when_complete.remove(os.path.join(run, other), "save_total_limit")
