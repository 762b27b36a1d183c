"""What a rank that saves by itself, without collectives, notes of the whole it has a part of.

It does not talk to the other ranks: it reads how many there are, and takes from the process group's
store a text that whoever came first has put there.
"""

from __future__ import annotations

import collections
import logging
import secrets
import threading

import torch.distributed as dist

_log = logging.getLogger("ringstow")

_RUN = "ringstow.dcp/run"

_lock = threading.Lock()
_saves: collections.Counter[str] = collections.Counter()
"""Saves that were begun in this process, by directory."""


def part_of(directory: str, rank: int) -> tuple[int, int, str] | None:
    """Return the rank, how many ranks save, and a text that tells this save from all others.

    The text is the same on all ranks: a random one of the process group, and the number of saves
    that each rank has begun into this directory. So parts of a save before a restart, or of one
    that some ranks did not finish, are never taken for parts of this one.

    DCP does not tell a writer which process group it saves with: this is the default one.

    Args:
        directory: the rank's own, below the whole's.
        rank: of this process in the save.

    Returns:
        None where that is not to be known: there is no process group, or the save is by another.
    """
    with _lock:
        _saves[directory] += 1
        number = _saves[directory]
    if not (dist.is_available() and dist.is_initialized()) or rank != dist.get_rank():
        return None
    run = _run()
    return None if run is None else (rank, dist.get_world_size(), f"{run}-{number}")


def _run() -> str | None:
    """Return a text that is the process group's own, the same on all its ranks."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(_RUN, "", secrets.token_hex(8)).decode()
    except Exception as error:
        _log.warning(
            "the process group's store does not answer (%s): the manifest will not say how many "
            "ranks save, and ringstow.latest will not find this checkpoint",
            error,
        )
        return None
