"""The checkpoints of a run: verify, find, remove them, and clear up after killed saves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._config import Config, native_json
from ringstow._paths import StrPath, absolute

if TYPE_CHECKING:
    from ringstow._report import Retained, Swept, VerifyReport


def verify(path: StrPath, *, config: Config | None = None) -> VerifyReport:
    """Read a whole checkpoint and compare every block with its checksum.

    Args:
        path: the checkpoint's directory.
        config: the knobs; None means the defaults.

    Returns:
        The report: ``ok``, and in ``damage`` each place that is damaged.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: the manifest is damaged, or a file is shorter or longer than it was.
        FormatError: the manifest is not one of ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    from ringstow._report import VerifyReport

    return VerifyReport.from_json(_native.verify(absolute(path), native_json(config)))


def latest(directory: StrPath, *, config: Config | None = None) -> str | None:
    """Return the path of the newest committed checkpoint in a directory; None if there is none.

    One that was committed and can't be loaded now is passed over, with a warning to the logger
    ``ringstow`` that says why. One whose ranks saved each by itself (DCP's
    ``use_collectives=False``) is committed if the part of every rank is, and all are of one save.

    Args:
        directory: where the checkpoints are.
        config: the knobs, of which ``stripe`` counts: a checkpoint whose files on other disks are
            not found is none that can be loaded. None means the defaults.

    Raises:
        OSError: the directory can't be read.
    """
    found = _native.latest(absolute(directory), native_json(config))
    return None if found is None else os.fspath(found)


def retain(
    directory: StrPath, keep: int, *, recycle: bool = True, config: Config | None = None
) -> Retained:
    """Remove all checkpoints directly in a directory but the newest ``keep``.

    The newest are those of the highest number at the end of their names. What has no number there
    (``best``, ``last``) is left alone. Each is removed whole or not at all, however this ends, and
    a load that has begun ends well. With several ranks, one of them calls this, after the save has
    ended on all. What ranks saved each by itself counts once. What another call has removed in the
    meantime counts as gone. What killed saves left in directories of steps before the newest goes
    too, but for what is being saved at this moment.

    Args:
        directory: where the checkpoints are.
        keep: how many stay, of those with a number that can be loaded; others are not counted and
            not removed.
        recycle: keep the files of the last one removed, in ``.ringstow-spares``, for the next save
            into a directory there to write over. That is faster than new files, and takes no more
            room than the next save would. False removes these, too. Those of ranks that saved each
            by itself are removed either way.
        config: the knobs, of which ``stripe`` counts; None means the defaults.

    Returns:
        What stays, what is gone or was cleared away, and what was left alone.

    Raises:
        InvalidStateError: ``keep`` is 0.
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Retained

    if keep < 0:
        raise ValueError(f"keep is a number of checkpoints, not {keep}")
    return Retained.from_json(
        _native.retain(absolute(directory), keep, recycle, native_json(config))
    )


def prune(directory: StrPath, *, config: Config | None = None) -> Swept:
    """Remove what killed saves and removals left in a directory, and in those directly in it.

    Committed checkpoints and files of others stay, and so does what is being saved at this moment.
    A save does the same for the directory that it saves into, `retain` for steps before the newest.

    Args:
        directory: where the checkpoints are, or one checkpoint.
        config: as in `retain`.

    Returns:
        What is gone, what was finished, and what was left alone.

    Raises:
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Swept

    return Swept.from_json(_native.prune(absolute(directory), native_json(config)))


def retire(path: StrPath, *, recycle: bool = True, config: Config | None = None) -> None:
    """Remove a checkpoint: after a crash it is there as it was, or not at all.

    Args:
        path: the checkpoint's directory. It stays if others' files are in it. A link is refused:
            name the directory that it leads to.
        recycle: keep its files for the next save to write over, as in `retain`.
        config: as in `retain`.

    Raises:
        IncompleteCheckpointError: there is no checkpoint, or files of a striped one aren't found,
            for want of ``Config.stripe``; they would stay on their disks.
        InvalidStateError: the path is a link; nothing is removed.
        BusyError: a save into the directory is under way.
        CorruptCheckpointError: the manifest is damaged, so that nobody can tell what belongs to it;
            remove the directory yourself.
        OSError: the system refused.
    """
    _native.retire(absolute(path), recycle, native_json(config))
