"""DCP's Metadata, which the coordinator sends to all ranks at the end of a save.

Programs and torch's writer pickle it to files, so its dicts are plain dicts. They are sent as
columns or tokens only to the other ranks, in DCP's next step after ringstow's commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from ringstow.dcp import _plan_transfer, _private
from ringstow.dcp._plan_transfer import Content, Table

T = TypeVar("T")
U = TypeVar("U")


class _Made(NamedTuple):
    """The contents of a Metadata, whose dicts are plain: torch's writer pickles them to a file."""

    metadata: weakref.ref[Metadata]
    stored: Content
    paths: Content | None
    is_known: bool
    """Whether all other ranks have these contents."""


_made: dict[int, _Made] = {}


def metadata_over(stored: Content, paths: Content | None, *, is_known: bool) -> Metadata:
    """Return metadata with these contents.

    Args:
        stored: the content of ``state_dict_metadata``.
        paths: the content of ``planner_data``; None if there is none.
        is_known: whether all other ranks have these contents.
    """
    metadata = Metadata(dict(stored.made), planner_data=None if paths is None else dict(paths.made))
    number = id(metadata)
    reference = weakref.ref(metadata, lambda _: _made.pop(number, None))
    _made[number] = _Made(reference, stored, paths, is_known)
    return metadata


def _made_of(metadata: Metadata) -> _Made | None:
    """Return the contents of metadata; None if another planner made it, or it was changed."""
    made = _made.get(id(metadata))
    if made is None or made.metadata() is not metadata:
        return None
    if _plan_transfer.unchanged_dict(metadata.state_dict_metadata, made.stored) is None:
        return None
    paths = metadata.planner_data
    if made.paths is None or type(paths) is not dict:
        return made if made.paths is None and paths is None else None
    return None if _plan_transfer.unchanged_dict(paths, made.paths) is None else made


def announce(metadata: Metadata) -> None:
    """Send metadata as columns or as a token in DCP's next step, which sends it to all ranks."""
    meeting, made = _private.save_meeting(), _made_of(metadata)
    if meeting is None or not meeting.use_dist or made is None:
        return
    metadata.state_dict_metadata = Table.once(made.stored, is_known=made.is_known)
    if made.paths is not None:
        metadata.planner_data = Table.once(made.paths, is_known=made.is_known)


def computed(metadata: Metadata, compute: Callable[[Metadata, U], T], more: U) -> T:
    """Return a function's result for the keys, kinds and paths of metadata, and cache it.

    Args:
        metadata: the metadata.
        compute: a function of a module, so that it is the same at each call.
        more: a further argument; if it differs from the last call's, the result is recomputed.
    """
    made = _made_of(metadata)
    if made is None:
        return compute(metadata, more)
    key = (compute, None if made.paths is None else made.paths.token)
    known = made.stored.memo.get(key)
    if known is None or known[0] != more:
        known = made.stored.memo[key] = more, compute(metadata, more)
    result: T = known[1]
    return result
