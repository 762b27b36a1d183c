"""Detects other saves to the same path, by another rank or by this process."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import time

from ringstow._core._errors import BusyError, InvalidStateError

_log = logging.getLogger("ringstow")

_MANIFEST = "manifest.json"
RANK_DIR = re.compile(r"rank\d{5,}")
"""The names of rank directories, if each rank saves by itself."""

_saved: set[str] = set()
"""The paths that this process has saved to."""


def refuse_other_ranks(path: str) -> None:
    """Refuse to replace a checkpoint that another rank of this job has saved.

    Rank 0 may replace it: it saves for all ranks. Does nothing without torch.distributed, or on one
    rank.

    Raises:
        InvalidStateError: another process committed the checkpoint at the path after this process
            started.
    """
    those = ranks() or _started_as()
    if those is None or not _is_anothers(path):
        return
    text = f"{path} was saved by another process while this one ran, and this is {_advice(*those)}"
    if those[0] > 0:
        raise InvalidStateError(f"{text}. Nothing was written")
    _log.warning("%s. It is replaced", text)


def refuse_run_of_other_ranks(root: str) -> None:
    """Refuse a run that another rank of this job saves into, if there is no process group.

    Raises:
        InvalidStateError: torchrun started this process as a rank other than 0, and another process
            has saved there since.
    """
    those = None if has_group() else _started_as()
    if those is None or those[0] == 0:
        return
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if _is_anothers(path):
            raise InvalidStateError(
                f"{path} was saved by another process while this one ran, which was started as "
                f"rank {those[0]} of {those[1]}, and there is no process group: call "
                "init_process_group before you make the manager, or save on rank 0 only"
            )


def _is_anothers(path: str) -> bool:
    """Return whether another process has committed a checkpoint at a path since our start."""
    if path in _saved:
        return False
    try:
        since = os.stat(os.path.join(path, _MANIFEST)).st_mtime
    except OSError:  # nothing exists there, or the save reports the error
        return False
    # A time in the future comes from another machine's clock, and cannot be compared with ours.
    return _started() < since <= time.time()


def saved(path: str) -> None:
    """Note that this process has committed a checkpoint at a path, and may replace it."""
    _saved.add(path)


def explained(error: BaseException, *, is_own: bool) -> BaseException:
    """Return a save's failure; to a BusyError, add what to do.

    Args:
        error: the failure.
        is_own: whether this process was saving to the same path already.
    """
    if not isinstance(error, BusyError):
        return error
    advice = []
    if is_own:
        advice.append(
            "the save in progress is this process' own: wait for its handle (handle.result()), or "
            "call handle.cancel() and then handle.result(). A signal handler may have "
            "interrupted that save: let it set a flag, and save after the step or to another "
            "path"
        )
    those = ranks()
    if those is not None:
        advice.append(f"this is {_advice(*those)}")
    elif (started := _started_as()) is not None:
        advice.append(
            f"this process was started as rank {started[0]} of {started[1]}, and there is no "
            "process group: call init_process_group before, or save on rank 0 only"
        )
    return BusyError("; ".join([str(error), *advice]), path=error.path) if advice else error


def _advice(rank: int, world_size: int) -> str:
    return (
        f"rank {rank} of {world_size}: save on rank 0 only, save to a path for each rank, or save "
        "sharded states with ringstow.dcp"
    )


def ranks() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks; None without ranks. Imports no torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    world_size = dist.get_world_size()
    return (dist.get_rank(), world_size) if world_size > 1 else None


def _started_as() -> tuple[int, int] | None:
    """Return rank and number of ranks from torchrun's variables; None for one process."""
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, world_size) if world_size > 1 else None


def has_group() -> bool:
    """Return whether there is a process group, even of one rank. Imports no torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


@functools.cache
def _started() -> float:
    """Return when this process started, in seconds since 1970; the current time if unknown."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
