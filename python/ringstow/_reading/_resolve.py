"""The checkpoint that a load reads, and its copies on the tiers of its run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ringstow import _native
from ringstow._core._arguments import StrPath, directory_to_read, to_read
from ringstow._core._config import Config, given, native_json
from ringstow._core._damage import is_damage
from ringstow._core._errors import IncompleteCheckpointError, NoCheckpointError
from ringstow._core._waiting import Again

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")


class Found(NamedTuple):
    """The checkpoint that a load reads."""

    path: str
    """The directory or URL."""
    copies: list[str]
    """Paths on the tiers that may have copies, the nearest first."""


def find(path: StrPath | Sequence[StrPath], config: Config | None) -> Found:
    """Return the checkpoint that a load must read.

    Args:
        path: its path or URL; or a list of the tiers of a run: then the newest step whose files are
            all on these tiers.
        config: the settings; its ``tiers`` may have copies of the checkpoint at a path.

    Raises:
        NoCheckpointError: no tier has a committed step; or the path is None.
        InvalidStateError: the tiers have steps of two runs.
        MissingFilesError, CorruptCheckpointError, FormatError: steps were committed, and none has
            all its files on the tiers.
        OSError: a tier can't be read.
    """
    if not isinstance(path, list | tuple):
        if not isinstance(path, str | os.PathLike | None):
            kind = type(path).__name__
            raise TypeError(f"a path, or the list of the tiers of a run, not a {kind}")
        where = to_read(path)
        return Found(where, copies_of(where, given(config).tiers))
    if not path:
        raise NoCheckpointError("there is no checkpoint in an empty list of tiers")
    tiers = [directory_to_read(tier) for tier in path]
    return Found(*_native.newest_of(tiers, native_json(config)))


def found_again(
    path: StrPath | Sequence[StrPath], config: Config | None, attempt: Callable[[Found], _T]
) -> _T:
    """Find the checkpoint, attempt to read it, and return the result.

    For tiers, search for the newest step again if another process has removed it.

    Raises:
        Exception: any error of `find` or of the attempt.
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
    """Return whether the newest step of the tiers has been removed since it was found."""
    return isinstance(path, list | tuple) and _native.has_gone(found.path)


def opened(found: Found, attempt: Callable[[str, list[str]], _T]) -> _T:
    """Open a checkpoint, or else the first of its copies that can be opened.

    Uses only copies of the same run: another run may use the same names.

    Args:
        found: the checkpoint.
        attempt: opens a path, given the paths of its copies.

    Raises:
        Exception: the error of the checkpoint itself.
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
    """Return whether an error concerns only this copy, so that another copy may be whole."""
    return isinstance(error, IncompleteCheckpointError | FileNotFoundError) or is_damage(error)


def shown(path: StrPath | Sequence[StrPath]) -> str:
    """Return a path, or the tiers of a run, for messages."""
    return " and ".join(map(str, path)) if isinstance(path, list | tuple) else str(path)


def copies_of(path: str, tiers: Sequence[StrPath]) -> list[str]:
    """Return where tiers may have copies of a checkpoint, by its own name, not a link's."""
    return _native.copies_of(path, [directory_to_read(tier) for tier in tiers])


@contextlib.contextmanager
def telling(found: Found) -> Iterator[None]:
    """Add a note to a checkpoint's error that its copies failed, too."""
    try:
        yield
    except Exception as error:
        if found.copies and _is_of_checkpoint(error):
            error.add_note(f"no copy helped: {', '.join(found.copies)}")
        raise
