"""The checkpoints of a run: verify, find, remove them, and clear up after killed saves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, SupportsIndex

from ringstow import _native
from ringstow._arguments import StrPath, absolute, of_checkpoint, step_number
from ringstow._config import Config, native_json

if TYPE_CHECKING:
    from ringstow._report import Retained, Step, Swept, VerifyReport


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

    return VerifyReport.from_json(_native.verify(of_checkpoint(path), native_json(config)))


def steps(
    directory: StrPath, *, pattern: str | None = None, config: Config | None = None
) -> list[Step]:
    """List the steps of a run, oldest first, also those that can't be loaded.

    A checkpoint is a step if it was saved as one: ``save(state, path, step=1000)``. So is one whose
    name has the same stem as the newest of these, such as ``step-`` of ``step-900``. Where none was
    saved as a step, the names alone decide: those of the newest save's stem, by the number at their
    end, which a suffix such as ``.pt`` or ``.ckpt`` may follow. A stem that says that it counts
    steps (``step-``, ``epoch_``, ``checkpoint-``) goes before any other (``best-7``), and one that
    several names have before one that a single name has (``gpt2``). A number that is a fraction
    (``loss=0.2``), a value (``acc=95``) or part of a date is no step, nor is a link to something in
    the directory itself.

    Where nothing counts as a step, all checkpoints are listed by the time of their commit, with a
    ``step`` of None.

    Args:
        directory: where the checkpoints are.
        pattern: which names are steps, and no others: ``"step-*"``, ``"ckpt_*.pt"``. The ``*``
            stands for the step. Where the name has more that varies, ``{step}`` stands for the
            step and ``*`` for anything: ``"epoch={step}-loss=*"``.
        config: the knobs, of which ``stripe`` counts; None means the defaults.

    Returns:
        The steps; none if the directory is not there. The last that can be loaded is what `latest`
        returns.

    Raises:
        InvalidStateError: the pattern does not say where the step is.
        OSError: the directory, or one in it that may be a step, can't be read.
    """
    from ringstow._report import Step

    return Step.list_from_json(_native.steps(absolute(directory), pattern, native_json(config)))


def latest(
    directory: StrPath,
    *,
    verify: bool = False,
    before: int | StrPath | None = None,
    pattern: str | None = None,
    config: Config | None = None,
) -> str | None:
    """Return the path of the newest step in a directory that can be loaded; None if there is none.

    Which checkpoints are steps, `steps` says. One that was committed and can't be loaded now is
    passed over, with a warning to the logger ``ringstow`` that says why. One whose ranks saved each
    by itself (DCP's ``use_collectives=False``) is committed if the part of every rank is, and all
    are of one save.

    Args:
        directory: where the checkpoints are. One that is not there has none.
        verify: read every byte, and compare it with its checksum: the way back from a damaged
            checkpoint. One whose bytes are not what was written is passed over, with a warning.
        before: only what is older than this step, or than the checkpoint at this path.
        pattern: as in `steps`.
        config: the knobs, of which ``stripe`` counts: a checkpoint whose files on other disks are
            not found is none that can be loaded. None means the defaults.

    Raises:
        InvalidStateError: the pattern does not say where the step is; or nothing in the directory
            is ``before``.
        OSError: the directory, or one in it that may be the newest step, can't be read. An
            unreadable sector is damage with ``verify``, and passed over.
    """
    limit: int | str | None
    if isinstance(before, str | os.PathLike):
        limit = absolute(before)
    else:
        limit = step_number(before, "before")
    found = _native.latest(absolute(directory), verify, limit, pattern, native_json(config))
    return None if found is None else os.fspath(found)


def retain(
    directory: StrPath,
    keep: int,
    *,
    recycle: bool | None = None,
    pattern: str | None = None,
    dry_run: bool = False,
    config: Config | None = None,
) -> Retained:
    """Remove all steps directly in a directory but the newest ``keep``.

    Which checkpoints are steps, `steps` says; all others are left alone, and so is a link and what
    a link in the directory leads to. The report names what counted as a step and what was left, and
    why. Where nothing counted, or several kinds of names looked like steps, it has a warning, which
    is logged, too.

    Each is removed whole or not at all, however this ends, and a load that has begun ends well.
    With several ranks, one of them calls this, after the save has ended on all. What ranks saved
    each by itself counts once. What another call has removed in the meantime counts as gone. What
    killed saves left in directories of steps before the newest goes too, except saves in progress.

    Args:
        directory: where the checkpoints are.
        keep: how many stay, of the steps that can be loaded; others are not counted and not
            removed.
        recycle: keep the files of the last one removed, in ``.ringstow-spares``, for the next save
            into a directory there to write over. That is faster than new files, and takes no more
            room than the next save would. `prune` with ``recycled=True`` frees them, and so does a
            save on a full disk. False removes these, too. None does what ``Config.recycle`` says:
            by default, False. Those of ranks that saved each by itself are removed either way.
        pattern: as in `steps`.
        dry_run: change nothing, and return what the call would do.
        config: the knobs, of which ``stripe`` and ``recycle`` count; None means the defaults.

    Returns:
        What stays, what is gone or was cleared away, and what was left alone.

    Raises:
        TypeError, ValueError: ``keep`` is no number, or below 0.
        InvalidStateError: ``keep`` is 0; or the pattern does not say where the step is.
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Retained

    if isinstance(keep, bool) or not isinstance(keep, SupportsIndex):
        raise TypeError(f"keep is a number of checkpoints, not {keep!r}")
    if keep < 0:
        raise ValueError(f"keep is a number of checkpoints, not {keep}")
    knobs = native_json(config)
    recycles = _recycles(recycle, config)
    return Retained.from_json(
        _native.retain(absolute(directory), keep, recycles, pattern, dry_run, knobs)
    )


def prune(directory: StrPath, *, recycled: bool = False, config: Config | None = None) -> Swept:
    """Remove what killed saves and removals left in a directory, and in those directly in it.

    Committed checkpoints and files of others stay, and so do saves in progress. A save does the
    same for the directory that it saves into, `retain` for steps before the newest.

    Args:
        directory: where the checkpoints are, or one checkpoint.
        recycled: remove recycled files, too: those of removed checkpoints that wait in
            ``.ringstow-spares`` for a save to write over them.
        config: the knobs, of which ``stripe`` counts; None means the defaults.

    Returns:
        What is gone, what was finished, and what was left alone.

    Raises:
        OSError: a directory can't be read, or a file not be removed.
    """
    from ringstow._report import Swept

    return Swept.from_json(_native.prune(absolute(directory), recycled, native_json(config)))


def remove(path: StrPath, *, recycle: bool | None = None, config: Config | None = None) -> None:
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
    knobs = native_json(config)
    _native.remove(of_checkpoint(path), _recycles(recycle, config), knobs)


def _recycles(recycle: bool | None, config: Config | None) -> bool:
    """Return what a caller said, else what the configuration says."""
    if recycle is not None:
        return recycle
    return (Config() if config is None else config).recycle
