"""The newest checkpoint of a run, the same on every rank.

On a network file system a rank may see a new directory seconds after rank 0. Ranks that each look
for the newest checkpoint may then load different ones.
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
            # Another process may have removed it meanwhile.
            has_gone = functools.partial(_native.has_gone, error.path)
            if not ranks.from_first(has_gone) or not ranks.from_first(again.may_try):
                raise
