"""Parts of checkpoints that ranks save each by itself, without collectives.

Such a rank does not talk to the others. It notes in its part how many ranks save, and a text that
all of them read from the process group's store. `ringstow.latest` goes by these notes, and a load
checks them here for its path. Each rank compares its part with rank 0's, and rank 0 checks that all
parts are there: so a load by n ranks reads 2 n manifests, not n squared. If a rank raises, DCP
makes all ranks fail.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import secrets
import stat
import threading
from typing import NamedTuple

import torch.distributed as dist

from ringstow import _native
from ringstow._errors import MissingShareError
from ringstow.dcp import _paths, _private

_log = logging.getLogger("ringstow")

_RUN = "ringstow.dcp/run"
_SHOWN_MAX = 20

_lock = threading.Lock()
_saves: collections.Counter[str] = collections.Counter()
"""Saves that this process has begun, by directory."""


def part_of(directory: str, rank: int) -> tuple[int, int, str] | None:
    """Return the rank, the number of ranks, and a text that identifies this save.

    The text is the same on all ranks: random characters of the process group, and the number of
    saves that each rank has begun into its directory. So parts of a save before a restart, or of
    one that some ranks did not finish, never count as parts of this one.

    DCP does not pass a writer the process group it saves with: this assumes the default one.

    Args:
        directory: the rank's own directory.
        rank: this process's rank in the save.

    Returns:
        None if unknown: there is no process group, or the save uses another one.
    """
    with _lock:
        _saves[directory] += 1
        number = _saves[directory]
    if not (dist.is_available() and dist.is_initialized()) or rank != dist.get_rank():
        return None
    try:
        run = _private.group_text(_RUN, secrets.token_hex(8))
    except Exception as error:
        _log.warning(
            "the process group's store does not answer (%s): the manifest will not say how many "
            "ranks save, and ringstow.latest will not find this checkpoint",
            error,
        )
        return None
    return rank, dist.get_world_size(), f"{run}-{number}"


class Note(NamedTuple):
    """What a manifest notes of the save that it is a part of."""

    rank: int
    ranks: int
    save: str
    """The same in all parts of one save."""


class Part(NamedTuple):
    """A committed part."""

    note: Note | None
    """None if an older version wrote it, if it is damaged, or if the rank could not know."""


def check(path: str, rank: int) -> None:
    """Refuse to load a rank's part that is missing, or not of the same save as rank 0's.

    Rank 0 refuses if any rank's part is missing. If neither part has a note, both are accepted.

    Args:
        path: the checkpoint's directory, with a directory for each rank.
        rank: the rank that loads.

    Raises:
        MissingShareError: names the part.
        OSError: the system refused.
    """
    first = _part(path, 0)
    own = first if rank == 0 else _part(path, rank)
    problem = problem_of(rank, own, first)
    if problem is None and rank == 0 and first is not None and first.note is not None:
        problem = _missing(_absent(path, first.note.ranks), first.note)
    if problem is not None:
        raise MissingShareError(f"{path} is not a complete checkpoint: {problem}", path=path)


def problem_of(rank: int, own: Part | None, first: Part | None) -> str | None:
    """Return what is wrong with a rank's part, and what to do; None if nothing is.

    Args:
        rank: the rank whose directory the part is in.
        own: the part there, if any.
        first: rank 0's part, if any.
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
    "`ringstow ls` shows its parts. To load one part alone, give its own directory"
)


def _missing(absent: list[int], note: Note) -> str | None:
    if not absent:
        return None
    ranks = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent[:_SHOWN_MAX]))
    if len(absent) > _SHOWN_MAX:
        ranks += " and more"
    return (
        f"{note.ranks} ranks saved it, each by itself, and no committed part is there of {ranks} "
        f"({_name(absent[0])}). {_REMEDY}"
    )


def _described(part: Part) -> str:
    if part.note is None:
        return "a save without a note"
    return f"save {part.note.save} by {part.note.ranks} ranks"


def _save(part: Part) -> tuple[int, str] | None:
    return None if part.note is None else (part.note.ranks, part.note.save)


def _name(rank: int) -> str:
    return _paths.of_rank("", rank)


def _is_committed(path: str, rank: int) -> bool:
    """Tell whether a rank's part has a manifest; links and pipes do not count."""
    manifest = os.path.join(_paths.of_rank(path, rank), _paths.MANIFEST)
    try:
        return stat.S_ISREG(os.lstat(manifest).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _absent(path: str, ranks: int) -> list[int]:
    """Return the ranks without a committed part, as many as an error names and one more."""
    absent = (rank for rank in range(ranks) if not _is_committed(path, rank))
    return list(itertools.islice(absent, _SHOWN_MAX + 1))


def _part(path: str, rank: int) -> Part | None:
    """Return a rank's part; None if not committed. The rank that loads it reports damage."""
    if not _is_committed(path, rank):
        return None
    note = _native.part_of(_paths.of_rank(path, rank))
    return Part(None if note is None else Note(*note))
