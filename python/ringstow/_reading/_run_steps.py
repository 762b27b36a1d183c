"""Verify, find and remove the checkpoints of a run, and clear up after killed saves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from ringstow import _native
from ringstow._core import _policies
from ringstow._core._arguments import (
    StrPath,
    absolute,
    directory_to_read,
    names_of_parts,
    object_url,
    of_checkpoint,
    step_number,
    to_read,
)
from ringstow._core._config import Config, given, native_json
from ringstow._core._errors import (
    InvalidStateError,
)
from ringstow._foreign import _steps
from ringstow._reports._progress import Progress

if TYPE_CHECKING:
    from ringstow._core._policies import Retention
    from ringstow._reports._checkpoint_reports import (
        DiffReport,
        Removed,
        Retained,
        Slimmed,
        Step,
        Swept,
    )
    from ringstow._reports._io_reports import VerifyReport


def verify(path: StrPath, *, config: Config | None = None) -> VerifyReport:
    """Read a whole checkpoint and compare every checksum chunk with its checksum.

    Continues after damage: chunks that differ, bad sectors, files that are missing or have another
    length.

    Args:
        path: the checkpoint's directory.
        config: the settings; None means the defaults.

    Returns:
        The report: ``ok``; each damaged range in ``damage``, with file, offset, bytes and the
        names of the tensors in it; all these names in ``damaged_tensors``.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: the manifest is damaged.
        FormatError: the manifest is not ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    from ringstow._reports._io_reports import VerifyReport

    where = to_read(path)
    with Progress(f"verifying {os.path.basename(where)}") as progress:
        return VerifyReport.from_json(
            _native.verify(where, native_json(config), progress=progress.advance)
        )


def diff(
    a: StrPath, b: StrPath, *, values: bool = False, config: Config | None = None
) -> DiffReport:
    """Compare two checkpoints: tensors, names, dtypes, shapes and values.

    Compares tensors by their checksums if possible, in any layout, and reads only the others: equal
    checksums count as equal bytes. Does not find damage on the disk; `verify` does. Either may be a
    directory of plain safetensors files; values are then not compared.

    Args:
        a: the first checkpoint's directory.
        b: the second checkpoint's directory.
        values: read each tensor that differs, count the elements that differ, and find the largest
            absolute difference.
        config: the settings; None means the defaults.

    Returns:
        The report: ``is_equal``, and the differences.

    Raises:
        IncompleteCheckpointError: a directory holds no committed checkpoint; or one is a rank
            checkpoint, and holds only part of a tensor that must be read.
        CorruptCheckpointError: a manifest, or bytes that were read, are damaged.
        FormatError: a manifest is not ringstow's, or a newer version's.
        OSError: the system refused: no such directory, no permission, a failing disk.
    """
    from ringstow._reports._checkpoint_reports import DiffReport

    return DiffReport.from_json(_native.diff(to_read(a), to_read(b), values, native_json(config)))


def steps(
    directory: StrPath, *, pattern: str | None = None, config: Config | None = None
) -> list[Step]:
    """List the steps of a run, oldest first, including those that can't be loaded.

    - A checkpoint is a step if it was saved as one: ``save(state, path, step=1000)``.
    - A checkpoint whose name has the same stem as the newest of these is a step, too, such as
      ``step-`` of ``step-900``.
    - If nothing was saved as a step, the names with the newest save's stem and a number at the end
      are the steps. A suffix such as ``.pt`` or ``.ckpt`` may follow the number.
    - A stem that counts steps (``step-``, ``epoch_``, ``checkpoint-``) takes precedence over any
      other (``best-7``), and a stem of several names over that of a single one (``gpt2``).
    - A number that is a fraction (``loss=0.2``), a value (``acc=95``) or part of a date is not a
      step. A link into the directory itself is not a step either.

    If nothing counts as a step, all checkpoints are listed by the time of their commit, with a
    ``step`` of None.

    Args:
        directory: the directory that holds the checkpoints.
        pattern: only names that match are steps: ``"step-*"``, ``"ckpt_*.pt"``. The ``*`` matches
            the step's number. If more of the name varies, ``{step}`` matches the number and ``*``
            anything: ``"epoch={step}-loss=*"``. None means the rules above.
        config: the settings, of which only ``stripe`` is used; None means the defaults.

    Returns:
        The steps; an empty list if the directory does not exist. `latest` returns the last one that
        can be loaded.

    Raises:
        InvalidStateError: the pattern does not have exactly one place for the step.
        OSError: the directory, or a directory in it that may be a step, can't be read.
    """
    from ringstow._reports._checkpoint_reports import Step

    return Step.list_from_json(
        _native.steps(directory_to_read(directory), pattern, native_json(config))
    )


def latest(
    directory: StrPath | Sequence[StrPath],
    *,
    verify: bool = False,
    before: int | StrPath | None = None,
    pattern: str | None = None,
    config: Config | None = None,
) -> Step | None:
    """Return the newest step that can be loaded; None if nothing was committed yet.

    ``ringstow.load(ringstow.latest("run"))`` loads it; ``.path`` is its path.

    See `steps` for which checkpoints are steps. A committed step that can't be loaded is skipped if
    an older step can be loaded, with a warning to the logger ``ringstow`` that says why. If each
    rank saved by itself (DCP's ``use_collectives=False``), a checkpoint counts as committed once
    all ranks have committed and all belong to one save.

    If nothing was committed, it returns the newest checkpoint that another program has left in the
    directory, such as ``checkpoint-500`` or ``epoch=1-step=500.ckpt``: `load` reads it, and
    training must not begin anew beside it. docs/loading.md says which count. With ``verify``,
    ``before`` or ``pattern``, only ringstow's checkpoints count.

    Args:
        directory: the directory that holds the checkpoints; it need not exist. A list names the
            tiers of one run, the nearest first, such as ``["/nvme/run", "s3://bucket/run"]``: the
            result is the nearest copy that can be loaded of the newest step of all tiers.
        verify: read every byte and compare it with its checksum. Skips a damaged checkpoint with a
            warning.
        before: return only a step older than this number, or than the checkpoint at this path. For
            tiers, a number.
        pattern: only names that match are steps, such as ``"step-*"``; see `steps`.
        config: the settings, of which only ``stripe`` is used: a checkpoint whose files on other
            disks are not found can't be loaded. None means the defaults.

    Raises:
        InvalidStateError: the pattern does not have exactly one place for the step; or ``before``
            is not a step in the directory; or the tiers have steps of two runs; or other programs
            have left checkpoints, and their names do not say which is the newest.
        MissingFilesError, CorruptCheckpointError, FormatError: steps were committed, and none of
            them can be loaded; says why the newest cannot. Training must not begin anew beside
            them.
        OSError: the directory, or a directory in it that may be the newest step, can't be read.
            With ``verify``, an unreadable sector counts as damage instead.
    """
    if isinstance(directory, list | tuple):
        tiers = [directory_to_read(tier) for tier in directory]
        number = step_number(cast("int | None", before), "before")  # refuses a path
        return _own_latest(tiers, verify, number, pattern, config)
    limit: int | str | None
    if isinstance(before, str | os.PathLike):
        limit = absolute(before)
    else:
        limit = step_number(before, "before")
    root = directory_to_read(cast("StrPath", directory))
    found = _own_latest([root], verify, limit, pattern, config)
    asks_for_ours = verify or before is not None or pattern is not None
    if found is not None or asks_for_ours or object_url(root):
        return found
    left = _steps.newest_in(root)
    if left is None:
        return None
    from ringstow._reports._checkpoint_reports import Step

    return Step.of_foreign(left.path, left.step)


def _own_latest(
    roots: list[str],
    verify: bool = False,
    before: int | str | None = None,
    pattern: str | None = None,
    config: Config | None = None,
) -> Step | None:
    """Return the newest of ringstow's steps, as `latest` does; never another program's."""
    from ringstow._reports._checkpoint_reports import Step

    found = _native.latest(roots, verify, before, pattern, native_json(config))
    return next(iter(Step.list_from_json(found)), None)


def retain(
    directory: StrPath,
    keep: int | Retention,
    *,
    recycle: bool | None = None,
    pattern: str | None = None,
    dry_run: bool = False,
    config: Config | None = None,
) -> Retained:
    """Remove the steps of a run that no rule keeps.

    ::

        ringstow.retain("run", keep=3)
        ringstow.retain("run", keep=ringstow.Retention(last=3, every=1000, best=("loss", "min", 2)))

    A step stays if one of the rules keeps it; the report says which. See `steps` for which
    checkpoints are steps. Other checkpoints, links and the targets of links in the directory are
    left alone. The report lists what counted as a step, and what was left alone and why. If nothing
    counted, or several kinds of names looked like steps, the report has a warning, which is also
    logged. If the system fails to remove a checkpoint, the others are still removed.

    Each checkpoint is removed entirely or not at all, even if the process is killed. A load that
    has begun completes. With several ranks, one of them calls this after the save has ended on all.
    Rank checkpoints of one step count once. Also removes the remains of killed saves of steps
    before the newest.

    Args:
        directory: the directory that holds the checkpoints.
        keep: how many of the newest steps to keep, or a `Retention`, which keeps the newest in any
            case. Steps that can't be loaded are neither counted nor removed.
        recycle: keep the files of the last removed checkpoint in ``.ringstow-spares``. The next
            save into ``directory`` overwrites them, which is faster than new files and takes no
            more space. `prune` with ``recycled=True`` removes them, and so does a save on a full
            disk. False removes earlier recycled files too. None means ``Config.recycle``, by
            default False. The files of rank checkpoints are never recycled.
        pattern: only names that match are steps, such as ``"step-*"``; see `steps`.
        dry_run: change nothing; return the report of what the call would do.
        config: the settings, of which only ``stripe`` and ``recycle`` are used; None means the
            defaults.

    Returns:
        The report: what was kept, removed, cleaned up and left alone.

    Raises:
        TypeError: ``keep`` is neither a number nor a `Retention`.
        InvalidStateError: ``keep`` is below 1, or has no rule, or has ``slim_after``; or the
            pattern does not have exactly one place for the step.
        OSError: ``directory`` can't be listed. `Retained.left` lists failures below it; the rest is
            done.
    """
    where = directory_to_read(directory)
    if keep is None:
        raise TypeError("keep must be a number of steps, or a ringstow.Retention, not None")
    kept = _policies.retention(keep)
    if kept.keeps_all:
        raise InvalidStateError("keep says not which steps to keep: keep=3, or Retention(last=3)")
    if kept.slim_after is not None:
        raise InvalidStateError(
            "Retention.slim_after is for a CheckpointManager: retain removes whole steps, and "
            "ringstow.slim drops parts of one"
        )
    from ringstow._reports._checkpoint_reports import Retained

    how = (_recycles(recycle, config), pattern, dry_run, native_json(config))
    return Retained.from_json(_native.retain(where, kept.rules, *how))


def prune(
    directory: StrPath,
    *,
    recycled: bool = False,
    no_other_writers: bool = False,
    dry_run: bool = False,
    config: Config | None = None,
) -> Swept:
    """Remove the remains of killed saves and removals in a directory and directly below it.

    Committed checkpoints, other programs' files and saves in progress stay. A save does the same
    for its own directory, and `retain` for steps before the newest.

    Args:
        directory: the directory that holds the checkpoints, or one checkpoint.
        recycled: also remove the recycled files in ``.ringstow-spares``.
        no_other_writers: promise that no other process saves there, on this host or another.
            Without it, directories whose lock does not exclude other hosts are unchanged, with the
            reason in `Swept.left`.
        dry_run: change nothing; return the report of what the call would do.
        config: the settings, of which only ``stripe`` is used; None means the defaults.

    Returns:
        The report: what was removed, renamed and left alone.

    Raises:
        OSError: ``directory`` can't be listed. `Swept.left` lists failures below it; the rest is
            done.
    """
    from ringstow._reports._checkpoint_reports import Swept

    knobs = native_json(config)
    return Swept.from_json(
        _native.prune(absolute(directory), recycled, no_other_writers, dry_run, knobs)
    )


def remove(path: StrPath, *, recycle: bool | None = None, config: Config | None = None) -> Removed:
    """Remove a checkpoint, entirely or not at all, even if the machine crashes.

    Args:
        path: the checkpoint's directory. It stays if it holds other programs' files. A link is
            refused: pass its target.
        recycle: keep its files for the next save to overwrite; see `retain`.
        config: the settings, of which only ``stripe`` and ``recycle`` are used; None means the
            defaults.

    Returns:
        The report: what was removed, and what is left and why. An empty directory that the system
        refuses to remove is also logged.

    Raises:
        IncompleteCheckpointError: there is no checkpoint; or files of a striped checkpoint are not
            found, so that a removal would leave them on their disks: set ``Config.stripe``.
        InvalidStateError: the path is a link; nothing is removed.
        BusyError: a save into the directory is in progress.
        CorruptCheckpointError: the manifest is damaged, so ringstow does not know the checkpoint's
            files; remove the directory yourself.
        OSError: the system refused.
    """
    from ringstow._reports._checkpoint_reports import Removed

    recycles = _recycles(recycle, config)
    return Removed.from_json(_native.remove(to_read(path), recycles, native_json(config)))


def slim(path: StrPath, drop: Iterable[str], *, config: Config | None = None) -> Slimmed:
    """Drop a part of a checkpoint, such as the optimizer's state, and free its disk space.

    The save must have named that part in ``droppable``. Everything else loads as before. Changes
    the checkpoint entirely or not at all, even if the process is killed; a load that has begun
    completes.

    Args:
        path: the checkpoint's directory. A link is refused: pass its target.
        drop: names to drop with all names below them: ``["optimizer"]`` also drops
            ``optimizer.state.0.exp_avg``. Names that were dropped before are skipped. Only keys of
            dicts can be dropped: a part of a list or a tuple is refused.
        config: the settings, of which only ``stripe`` is used; None means the defaults.

    Returns:
        The report: what was dropped and removed.

    Raises:
        TypeError: ``drop`` is a string, or holds something other than strings.
        InvalidStateError: the checkpoint does not have a name, or no file would be freed, or no
            tensor would be left; or the path is a link.
        UnsupportedError: each rank saved by itself; or the lock cannot show whether another host is
            saving there.
        IncompleteCheckpointError: there is no checkpoint, or files of a striped one are not found.
        BusyError: a save into the directory is in progress.
        NotDurableError: the checkpoint is slimmed, but a crash may undo that.
        OSError: the system refused.
    """
    from ringstow._reports._checkpoint_reports import Slimmed

    names = names_of_parts(drop, "drop")
    return Slimmed.from_json(_native.slim(of_checkpoint(path), names, native_json(config)))


def _recycles(recycle: bool | None, config: Config | None) -> bool:
    """Return the caller's choice, or else the configuration's."""
    return given(config).recycle if recycle is None else recycle
