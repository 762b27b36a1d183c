"""The newest checkpoint of a run, the same on every rank.

On a network file system a rank may see a new directory seconds after rank 0. Ranks that each look
for the newest checkpoint may then load different ones.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

import ringstow
from ringstow import _late, _native, _others
from ringstow._arguments import StrPath
from ringstow._config import Config
from ringstow._errors import NoCheckpointError
from ringstow._patience import Again
from ringstow.dcp import _mark, _paths
from ringstow.dcp._together import from_first, gathered

if TYPE_CHECKING:
    from ringstow._catalog_report import Step


def latest(
    directory: StrPath | Sequence[StrPath],
    process_group: dist.ProcessGroup | None = None,
    *,
    verify: bool = False,
    before: int | StrPath | None = None,
    pattern: str | None = None,
    config: Config | None = None,
) -> Step | None:
    """Return the newest step that can be loaded, as the group's rank 0 sees it.

    All ranks of the group call this. Rank 0 looks, and the others wait until they see that
    checkpoint as well. Without a process group it is `ringstow.latest`.

    Args:
        directory: the directory that holds the checkpoints, or the tiers of one run, as in
            `ringstow.latest`; only rank 0's counts.
        process_group: the ranks; None means the default group.
        verify: as in `ringstow.latest`; rank 0 reads every byte.
        before: as in `ringstow.latest`.
        pattern: as in `ringstow.latest`.
        config: as in `ringstow.latest`.

    Raises:
        NoCheckpointError: some ranks do not see the checkpoint that rank 0 has found; names them.
            All ranks raise it.
        Exception: what `ringstow.latest` raises on rank 0, on all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ringstow.latest(
            directory, verify=verify, before=before, pattern=pattern, config=config
        )
    again = Again()
    while True:
        found = from_first(
            lambda: ringstow.latest(
                directory, verify=verify, before=before, pattern=pattern, config=config
            ),
            process_group,
        )
        try:
            if found is not None:
                agree_on(found.path, process_group)
            return found
        except NoCheckpointError as error:
            # Another process may have removed it meanwhile.
            has_gone = functools.partial(_native.has_gone, error.path)
            if not from_first(has_gone, process_group) or not from_first(
                again.may_try, process_group
            ):
                raise


def agree_on(path: str, group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks see a checkpoint.

    Raises:
        NoCheckpointError: some do not see it.
    """
    seen = gathered(_wait_for(path), group)
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise NoCheckpointError(
            f"rank 0 has found {path}, but rank(s) {', '.join(blind)} did not see it for "
            f"{_late.SEEN_S:.0f} s: do all ranks use one shared file system, mounted at the same "
            "path?",
            path=path,
        )


def _wait_for(path: str) -> bool:
    """Wait until this rank sees a checkpoint; tell whether it does."""
    until = time.monotonic() + _late.SEEN_S
    while not sees(path):
        was_removed = _native.has_gone(path) and _native.shared_file_system(path) is None
        if was_removed or time.monotonic() >= until:
            return False
        time.sleep(_late.POLL_S)
    return True


def sees(path: str) -> bool:
    """Return whether this rank sees a checkpoint, or the rank checkpoints that it consists of."""
    _late.look_again(path)
    try:
        names = os.listdir(path)
    except OSError:
        return False
    # Not `rank00000-0.safetensors.part`: a save that is not committed.
    is_torchs = _mark.NAME in names and any(name.endswith(".distcp") for name in names)
    has_parts = any(map(_others.RANK_DIR.fullmatch, names))
    return _paths.MANIFEST in names or has_parts or is_torchs
