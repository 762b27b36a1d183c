"""Which checkpoint a load reads, and where its copies are on the tiers of its run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ringstow import _catalog, _native
from ringstow._arguments import StrPath, directory_to_read, object_url, to_read
from ringstow._config import Config, given, native_json
from ringstow._damage import is_damage
from ringstow._errors import IncompleteCheckpointError, NoCheckpointError
from ringstow._patience import Again

if TYPE_CHECKING:
    from ringstow._catalog_report import Step

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")


class Found(NamedTuple):
    """A checkpoint that a load reads."""

    path: str
    """Its directory or URL."""
    copies: list[str]
    """Where the tiers may have copies of it, the nearest first."""


def find(path: StrPath | Sequence[StrPath], config: Config | None) -> Found:
    """Return the checkpoint that a load is to read.

    Args:
        path: its path or URL; or a list of the tiers of a run, of which it is the newest step
            that has all of its files there, on one tier or on several.
        config: the settings; of a path, its ``tiers`` may have copies.

    Raises:
        NoCheckpointError: no tier has a committed step; or the path is None.
        InvalidStateError: the tiers have steps of two runs.
        MissingFilesError, CorruptCheckpointError, FormatError: steps were committed, and none has
            all of its files on the tiers.
        OSError: a tier can't be read.
    """
    if not isinstance(path, list | tuple):
        if not isinstance(path, str | os.PathLike | None):
            kind = type(path).__name__
            raise TypeError(f"a path, or the list of the tiers of a run, not a {kind}")
        where = to_read(path)
        return Found(where, copies_of(where, given(config).tiers))
    tiers = [directory_to_read(tier) for tier in path]
    _catalog.refuse_two_runs(tiers)
    return _newest(tiers, config)


def found_again(
    path: StrPath | Sequence[StrPath], config: Config | None, attempt: Callable[[Found], _T]
) -> _T:
    """Return what an attempt to read a checkpoint returns.

    The newest step of a list is looked for again if another process has removed it meanwhile.

    Raises:
        Exception: as from `find`, and what the attempt raises.
    """
    again = Again()
    while True:
        found = find(path, config)
        try:
            return attempt(found)
        except (IncompleteCheckpointError, FileNotFoundError) as error:
            if not has_gone(path, found) or not again.may_try():
                raise
            _log.debug("looking again for the newest step: %s", error)


def has_gone(path: StrPath | Sequence[StrPath], found: Found) -> bool:
    """Whether the newest step of a list has been removed since it was found."""
    return isinstance(path, list | tuple) and _native.has_gone(found.path)


def _newest(tiers: list[str], config: Config | None) -> Found:
    """Return the newest step of which the tiers have all files together."""
    listed: list[Step] = []
    for tier in tiers:
        warn_if_missing(tier)
        steps = _catalog.steps(tier, config=config)
        warn_of_lost_manifests(steps)
        listed += steps
    # A damaged manifest does not tell when it was committed.
    damaged = [
        step for step in listed if step.created_unix_ms is None and step.status != "incomplete"
    ]
    for step in damaged:
        _log.warning("passing over %s, which cannot be loaded: %s", step.path, step.problem)
    committed = [step for step in listed if step.created_unix_ms is not None]
    failure: Exception | None = None
    # A stable sort: of copies the nearest first.
    for _, group in itertools.groupby(sorted(committed, key=newest_first), newest_first):
        nearest, *others = group
        found = Found(nearest.path, [other.path for other in others])
        if nearest.status == "committed":
            return found
        try:
            _native.Checkpoint(found.path, native_json(config), copies=found.copies)
        except Exception as error:
            if not _is_of_checkpoint(error):
                raise
            _log.warning("passing over %s, which cannot be loaded: %s", found.path, error)
            failure = failure or error
        else:
            return found
    if failure is None and damaged:
        newest = max(damaged, key=lambda step: step.order)
        _native.Checkpoint(newest.path, native_json(config))  # raises what is wrong with it
    if failure is not None:
        raise failure
    raise NoCheckpointError(
        f"there is no checkpoint in {shown(tiers) or 'an empty list of tiers'}: no step was "
        "committed"
    )


def was_committed(step: Step) -> bool:
    """Whether a step has a manifest: a damaged one is an error of its load, not a step less."""
    was_killed = step.status == "incomplete" and step.created_unix_ms is None
    return step.step is not None and not was_killed


def warn_of_lost_manifests(steps: list[Step]) -> None:
    """Tell of steps that are newer than the newest committed one, and were committed once."""
    for found in reversed(steps):
        if was_committed(found):
            break
        if _has_lost_manifest(found.path):
            _log.warning(
                "passing over %s, whose manifest is gone: only a committed checkpoint has "
                "files of these names, so somebody has removed it, or is still copying",
                found.path,
            )


def _has_lost_manifest(path: str) -> bool:
    """Return whether files of a commit are in a directory, which no removal has begun to clear."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    marks = ("manifest.json", "manifest.json.retired")
    has_shards = any(name.endswith(".safetensors") for name in names)
    return has_shards and not any(mark in names for mark in marks)


def warn_if_missing(tier: str) -> None:
    """Tell of a tier that does not exist: the steps that it may have are not seen."""
    if object_url(tier) is None and not os.path.exists(tier):
        _log.warning(
            "%s does not exist: there is nothing to restore from it, and the first copy creates "
            "it. Is its disk mounted?",
            tier,
        )


def newest_first(step: Step) -> tuple[int, ...]:
    """Return what sorts the newest save first, and is the same of all copies of one save."""
    return tuple(-number for number in step.order)


def opened(found: Found, attempt: Callable[[str, list[str]], _T]) -> _T:
    """Return what opens a checkpoint, or else the first of its copies that can be opened.

    Only of copies of the same run: a program of another run may use the same names.

    Args:
        found: the checkpoint.
        attempt: opens a path, with the copies that it has.

    Raises:
        Exception: what is wrong with the checkpoint itself.
    """
    try:
        return attempt(*found)
    except Exception as error:
        if not _is_of_checkpoint(error):
            raise
        failure = error
    for number, copy in enumerate(found.copies, 1):
        if not _native.is_one_run(found.path, copy):
            continue
        try:
            checkpoint = attempt(copy, found.copies[number:])
        except Exception as error:
            _log.debug("%s cannot be opened: %s", copy, error)
            continue
        _log.warning("%s is loaded instead of %s: %s", copy, found.path, failure)
        return checkpoint
    raise failure


def _is_of_checkpoint(error: Exception) -> bool:
    """Whether an error concerns one checkpoint alone, so that a copy of it may be whole."""
    return isinstance(error, IncompleteCheckpointError | FileNotFoundError) or is_damage(error)


def shown(path: StrPath | Sequence[StrPath]) -> str:
    """Return a path, or the tiers of a run, for messages."""
    return " and ".join(map(str, path)) if isinstance(path, list | tuple) else str(path)


def copies_of(path: str, tiers: Sequence[StrPath]) -> list[str]:
    """Return where tiers may have copies of a checkpoint: under its name, not that of a link."""
    return _native.copies_of(path, [directory_to_read(tier) for tier in tiers])


@contextlib.contextmanager
def telling(found: Found) -> Iterator[None]:
    """Add to what is wrong with a checkpoint that its copies did not help."""
    try:
        yield
    except Exception as error:
        if found.copies and _is_of_checkpoint(error):
            error.add_note(f"no copy helped: {', '.join(found.copies)}")
        raise
