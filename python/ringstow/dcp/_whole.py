"""Whether a rank's part of what ranks saved each by itself is of one save with the others'.

``ringstow.latest`` asks that of what it finds; this asks it of a path that a load was given. Each
rank compares its part with rank 0's, and rank 0 looks whether all are there, so that a load by
thousands of ranks does not read the square of so many manifests. DCP has all ranks fail where one
does.
"""

from __future__ import annotations

import itertools
import os
import stat
from typing import NamedTuple

from ringstow import _native
from ringstow._errors import IncompleteCheckpointError
from ringstow.dcp import _paths

_SHOWN_MAX = 20


class Note(NamedTuple):
    """What a manifest says that it is a part of."""

    rank: int
    ranks: int
    save: str
    """The same in all parts of one save."""


class Part(NamedTuple):
    """A part that is committed."""

    note: Note | None
    """None of an older version's, of a damaged one, and where its rank could not know."""


def check(path: str, rank: int) -> None:
    """Refuse to load a rank's part if it is not there, or of another save than rank 0's.

    Rank 0 refuses if any rank's part is not there. Parts of which neither says what it is a part of
    are taken as they are: nobody can tell.

    Args:
        path: of the whole.
        rank: that is to load.

    Raises:
        IncompleteCheckpointError: says which part it is.
        OSError: the system refused.
    """
    first = _part(path, 0)
    own = first if rank == 0 else _part(path, rank)
    problem = problem_of(rank, own, first)
    if problem is None and rank == 0 and first is not None and first.note is not None:
        problem = _missing(_absent(path, first.note.ranks), first.note)
    if problem is not None:
        raise IncompleteCheckpointError(
            f"{path} is not a complete checkpoint: {problem}", path=path
        )


def problem_of(rank: int, own: Part | None, first: Part | None) -> str | None:
    """Return what is wrong with a rank's part, and what to do; None if nothing is known to be.

    Args:
        rank: whose directory the part is in.
        own: the part there, if there is one.
        first: the part of rank 0.
    """
    if own is None:
        if first is None or first.note is None:
            return None
        if rank >= first.note.ranks:
            ranks = first.note.ranks
            return f"{ranks} ranks saved it, each by itself: load it on {ranks}, not on more"
        return _missing([rank], first.note)
    if own.note is not None and own.note.rank != rank:
        name = _name(rank)
        return f"{name} holds the part of rank {own.note.rank}: was it renamed? {_REMEDY}"
    if first is None:
        return None if own.note is None else _missing([0], own.note)
    if _save(own) != _save(first):
        return (
            f"its parts must be of one save, and {_name(rank)} is of {_described(own)}, "
            f"{_name(0)} of {_described(first)}. {_REMEDY}"
        )
    return None


_REMEDY = (
    "Resume from an earlier checkpoint, which ringstow.latest finds, or save again on all ranks; "
    "`ringstow ls` on it tells more. One part by itself is loaded from its own directory"
)


def _missing(absent: list[int], note: Note) -> str | None:
    if not absent:
        return None
    ranks = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent[:_SHOWN_MAX]))
    if len(absent) > _SHOWN_MAX:
        ranks += " and more"
    return (
        f"of {note.ranks} ranks that saved each by itself, no committed part is there of {ranks} "
        f"({_name(absent[0])}). {_REMEDY}"
    )


def _described(part: Part) -> str:
    if part.note is None:
        return "one that does not say by how many ranks it was"
    return f"save {part.note.save} by {part.note.ranks} ranks"


def _save(part: Part) -> tuple[int, str] | None:
    return None if part.note is None else (part.note.ranks, part.note.save)


def _name(rank: int) -> str:
    return _paths.of_rank("", rank)


def _is_committed(path: str, rank: int) -> bool:
    """Tell whether a rank's part has a manifest.

    A link is none, as everywhere; nor is a pipe.
    """
    manifest = os.path.join(_paths.of_rank(path, rank), _paths.MANIFEST)
    try:
        return stat.S_ISREG(os.lstat(manifest).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _absent(path: str, ranks: int) -> list[int]:
    """Return the ranks that have no committed part; no more of them than are worth naming."""
    absent = (rank for rank in range(ranks) if not _is_committed(path, rank))
    return list(itertools.islice(absent, _SHOWN_MAX + 1))


def _part(path: str, rank: int) -> Part | None:
    """Return a rank's part; None if it has not committed one.

    Of damage, the rank tells that loads the part.
    """
    if not _is_committed(path, rank):
        return None
    note = _native.part_of(_paths.of_rank(path, rank))
    return Part(None if note is None else Note(*note))
