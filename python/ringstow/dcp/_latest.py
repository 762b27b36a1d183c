"""The newest checkpoint of a run, the same on every rank.

On a network file system a rank may see a new directory seconds after rank 0. If each rank searched
for the newest checkpoint, ranks could load different ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ringstow
from ringstow import _native
from ringstow._core._arguments import StrPath
from ringstow._core._config import Config
from ringstow._core._errors import NoCheckpointError
from ringstow._core._waiting import Again
from ringstow._ranks._group import team_of

if TYPE_CHECKING:
    import torch.distributed as dist

if TYPE_CHECKING:
    from ringstow._reports._checkpoint_reports import Step


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

    All ranks of the group call this. Rank 0 searches, and the others wait until they see that
    checkpoint as well. Without a process group, it is the same as `ringstow.latest`.

    Args:
        directory: the directory that holds the checkpoints, or a list of the tiers of one run; only
            rank 0's is used.
        process_group: the ranks; None means the default group.
        verify: rank 0 reads every byte and compares it with its checksum; skips damaged steps.
        before: return only a step older than this number, or than the checkpoint at this path.
        pattern: only names that match are steps, such as ``"step-*"``; see `ringstow.steps`.
        config: the settings, of which only ``stripe`` is used; None means the defaults.

    Raises:
        NoCheckpointError: some ranks do not see the checkpoint that rank 0 has found; names them.
            All ranks raise it.
        Exception: rank 0's error of `ringstow.latest`, on all ranks.
    """
    ranks = team_of(process_group)
    look = functools.partial(
        ringstow.latest, directory, verify=verify, before=before, pattern=pattern, config=config
    )
    again = Again()
    while True:
        found = ranks.from_first(look)
        if found is None or ranks.size == 1:
            return found
        try:
            ranks.see(found.path, is_found=True)
            return found
        except NoCheckpointError as error:
            # Another process may have removed the checkpoint meanwhile.
            has_gone = functools.partial(_native.has_gone, error.path)
            if not ranks.from_first(has_gone) or not ranks.from_first(again.may_try):
                raise
