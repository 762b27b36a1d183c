"""The note of a rank that saves by itself, without collectives, in its manifest.

Such a rank does not communicate with the others. Its note holds the number of ranks, and a text
that all ranks read from the process group's store. `ringstow.latest` finds only checkpoints whose
parts all have the same note, and a load compares them (`_native.check_own_share`).
"""

from __future__ import annotations

import collections
import logging
import secrets
import threading

import torch.distributed as dist

from ringstow.dcp import _private

_log = logging.getLogger("ringstow")

_RUN = "ringstow.dcp/run"

_lock = threading.RLock()  # re-entrant: a signal handler may save, too
_saves: collections.Counter[str] = collections.Counter()
"""Saves that this process has begun, by directory."""


def part_of(directory: str, rank: int) -> tuple[int, int, str] | None:
    """Return the rank, the number of ranks, and a text that identifies this save.

    The text is the same on all ranks: random characters of the process group, and the number of
    saves that each rank has begun into its directory. So parts of a save before a restart, or of a
    save that some ranks did not finish, never count as parts of this save.

    DCP does not pass the process group to a writer: this assumes the default group.

    Args:
        directory: the rank's own directory.
        rank: this process's rank in the save.

    Returns:
        None if unknown: there is no process group, or the save uses another one.
    """
    with _lock:
        _saves[directory] += 1
        number = _saves[directory]
    if not (dist.is_available() and dist.is_initialized()) or rank != dist.get_rank():
        return None
    try:
        run = _private.group_text(_RUN, secrets.token_hex(8))
    except Exception as error:
        _log.warning(
            "the process group's store does not answer (%s): the manifest will not say how many "
            "ranks save, and ringstow.latest will not find this checkpoint",
            error,
        )
        return None
    return rank, dist.get_world_size(), f"{run}-{number}"
