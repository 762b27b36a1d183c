"""Reads the data of the page: manifests and, if requested, every byte."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core._arguments import StrPath, directory_to_read, object_url
from ringstow._core._errors import Error, NoCheckpointError
from ringstow._program._page._run import Change, Checkpoint, Run, Tensor
from ringstow._reading import _run_steps
from ringstow._reading._checkpoint import Checkpoint as Opened
from ringstow._reading._checkpoint import Entry
from ringstow._reading._checkpoint import open as open_checkpoint
from ringstow._reports import _history

if TYPE_CHECKING:
    from ringstow._reports._checkpoint_reports import CheckpointInfo, DiffReport, Step

_log = logging.getLogger("ringstow")
_VALUES_MAX = 200
_TEXT_MAX = 120


def gather(directory: StrPath, *, steps: int, changes: int, verifies: bool) -> Run:
    """Return the data of a run.

    Args:
        directory: the run's directory or URL.
        steps: how many of the newest steps to show.
        changes: how many of these to compare with the previous step.
        verifies: whether to read every byte of these steps.

    Raises:
        NoCheckpointError: the run has no checkpoint and no history.
        OSError: the run can't be read.
    """
    where = directory_to_read(directory)
    found = _run_steps.steps(where)
    shown = found[-steps:]
    history = [] if object_url(where) is not None else _history.read(where)
    if not shown and not history:
        raise NoCheckpointError(f"{where} has no checkpoint: there is nothing to report")
    checkpoints = [_checkpoint(step, verifies=verifies) for step in shown]
    whole = [step for step in shown if step.status == "committed"]
    newest = whole[-1] if whole else None
    tensors, values = ((), ()) if newest is None else _contents(newest.path)
    pairs = list(itertools.pairwise(whole))[-changes:] if changes else []
    saves = [entry for entry in history if entry.kind == "save"]
    last = next((entry for entry in reversed(saves) if entry.error is None), None)
    return Run(
        directory=where,
        written=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        version=_native.__version__,
        checkpoints=tuple(checkpoints),
        left_out=len(found) - len(shown),
        newest=None if newest is None else os.path.basename(newest.path),
        tensors=tensors,
        values=values,
        changes=tuple(_change(before, after) for before, after in pairs),
        measured=tuple(_measured(checkpoints, saves)),
        saves=tuple(saves[-steps:]),
        failed_copies=_failed_copies(history),
        fallbacks=() if last is None else last.fallbacks,
        unfinished=_unfinished(where),
    )


def _checkpoint(step: Step, *, verifies: bool) -> Checkpoint:
    info: CheckpointInfo | None = None
    problem = step.problem
    damage: tuple[str, ...] | None = None
    if step.status == "committed":
        try:
            with open_checkpoint(step.path) as opened:
                info = opened.info
            if verifies:
                report = _run_steps.verify(step.path)
                damage = tuple(
                    f"{os.path.basename(one.file)} at {one.offset}: {one.what} should be "
                    f"{one.expected}, is {one.got}"
                    for one in report.damage
                )
        except (Error, OSError) as error:
            problem = str(error)
    return Checkpoint(
        name=os.path.basename(step.path),
        step=step.step,
        created_unix_ms=step.created_unix_ms,
        nbytes=step.nbytes,
        shared_bytes=0 if info is None else info.shared_bytes,
        tensors=None if info is None else info.tensors,
        ranks=None if info is None else info.world_size,
        writer="" if info is None else info.writer,
        metrics=step.metrics,
        dropped=step.dropped,
        problem=problem,
        damage=damage,
    )


def _contents(path: str) -> tuple[tuple[Tensor, ...], tuple[tuple[str, str], ...]]:
    """Return the tensors and the values of a checkpoint."""
    try:
        with open_checkpoint(path) as opened:
            tensors = tuple(
                Tensor(name=name, dtype=one.dtype, shape=one.shape, nbytes=one.nbytes)
                for name, one in opened.items()
                if one.kind in ("tensor", "array")
            )
            return tensors, tuple(_values(opened))
    except (Error, OSError) as error:
        _log.warning("%s: its tensors are not shown: %s", path, error)
        return (), ()


def _values(opened: Opened) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def walk(value: Any, name: str) -> None:
        if len(found) >= _VALUES_MAX or isinstance(value, Entry):
            return
        if isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple) and any(
            isinstance(one, dict | Entry) for one in value
        ):
            for number, one in enumerate(value):
                walk(one, f"{name}.{number}")
        else:
            found.append((name, _short(repr(value))))

    walk(opened.tree, "")
    return found


def _change(before: Step, after: Step) -> Change:
    names = os.path.basename(before.path), os.path.basename(after.path)
    try:
        report = _run_steps.diff(before.path, after.path)
        with open_checkpoint(after.path) as opened:
            sizes = {name: one.nbytes for name, one in opened.items()}
    except (Error, OSError) as error:
        return Change(before=names[0], after=names[1], problem=str(error))
    return _change_of(names, report, sizes)


def _change_of(names: tuple[str, str], report: DiffReport, sizes: dict[str, int]) -> Change:
    changed = [one.name for one in report.differing] + [one.name for one in report.changed]
    return Change(
        before=names[0],
        after=names[1],
        changed=tuple(changed),
        changed_bytes=sum(sizes.get(name, 0) for name in changed),
        equal=report.equal_tensors,
        added=report.only_in_b,
        removed=report.only_in_a,
        values=tuple((one.name, _short(one.a), _short(one.b)) for one in report.values),
    )


def _measured(
    checkpoints: list[Checkpoint], saves: list[_history.Entry]
) -> list[Checkpoint | _history.Entry]:
    """Return the entries with metrics, ordered by step; for each step, its last save."""
    every: list[Checkpoint | _history.Entry] = [*saves, *checkpoints]
    last: dict[int | str, Checkpoint | _history.Entry] = {}
    for one in every:
        if one.metrics:
            last[one.name if one.step is None else one.step] = one
    return sorted(last.values(), key=lambda one: -1 if one.step is None else one.step)


def _failed_copies(history: list[_history.Entry]) -> tuple[tuple[str, str, str], ...]:
    """Return the copies that failed, except those that a later attempt completed."""
    last = {(one.name, one.to): one.error for one in history if one.kind == "promotion"}
    return tuple((name, to or "?", error) for (name, to), error in last.items() if error)


def _unfinished(where: str) -> tuple[tuple[str, str], ...]:
    if object_url(where) is not None:
        return ()
    try:
        return tuple(_native.unfinished(where))
    except (Error, OSError) as error:
        _log.warning("%s: copies that have not ended are not shown: %s", where, error)
        return ()


def _short(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."
