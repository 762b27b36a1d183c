"""Caches the plans that the ranks of a group know of each other from earlier saves.

A rank sends a plan as known only if its last save in the group got an answer from the coordinator:
the answer says what the coordinator keeps. After a save that fails before the answer, all ranks
send complete plans, so no rank relies on what another has forgotten.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from ringstow.dcp import _plan_columns, _private, _sent_metadata
from ringstow.dcp._plan_transfer import Content, Items, Table, Token
from ringstow.dcp._write_plan import Outline

# Enough for a model and its optimizer, saved separately.
_STRUCTURES_MAX = 2


class Part(NamedTuple):
    """One rank's plan."""

    items: Content
    paths: Content | None
    """The plan's ``planner_data``; None if it is not flattened."""

    def contents(self) -> list[Content]:
        """Return the plan's contents."""
        return [self.items] if self.paths is None else [self.items, self.paths]


class Mine(NamedTuple):
    """A plan that this rank has made."""

    outline: Outline
    part: Part


class Planned(NamedTuple):
    """The coordinator's result for one plan of each rank."""

    given: list[Part]
    answers: list[Part]
    metadata: Part
    """The dicts of Metadata, in place of the items and their paths."""

    def of_rank(self, rank: int) -> list[Content]:
        """Return the contents that rank and coordinator both keep."""
        return [*self.given[rank].contents(), *self.answers[rank].contents()]

    def new_metadata(self, *, is_known: bool) -> Metadata:
        """Return new metadata; all other ranks may already have its contents."""
        return _sent_metadata.metadata_over(*self.metadata, is_known=is_known)


class Memory:
    """The cache of one rank of a group; the coordinator also caches all ranks' plans."""

    def __init__(self) -> None:
        # Saves without a process group may run in several threads.
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too
        self._is_under_way = False
        self._mine: dict[Token, Mine] = {}
        """Plans that the coordinator keeps too."""
        self._kept: list[Content] = []
        self._planned: collections.OrderedDict[Any, Planned] = collections.OrderedDict()
        self._promised: list[frozenset[Token]] = []

    # Methods for every rank.

    def begin(self) -> list[Mine]:
        """Begin a save, and return the plans that may be sent as known."""
        with self._lock:
            if self._is_under_way:  # the last save failed: the coordinator's state is unknown
                self._mine, self._kept = {}, []
            self._is_under_way = True
            return list(self._mine.values())

    def heard(self, mine: Mine, answer: Part | None, promise: Set[Token]) -> None:
        """Store the coordinator's answer, and the contents that it promises to keep."""
        contents = [*mine.part.contents(), *([] if answer is None else answer.contents())]
        with self._lock:
            self._is_under_way = False
            kept = {one.token: one for one in (*self._kept, *contents)}
            self._kept = [kept[token] for token in promise if token in kept]
            plans = self._mine | {mine.part.items.token: mine}
            self._mine = {token: one for token, one in plans.items() if token in promise}

    # Methods for the coordinator.

    def recall(self, key: object) -> Planned | None:
        """Return the earlier result for the same plans."""
        return self._planned.get(key)

    def promise(self, key: object, planned: Planned) -> list[frozenset[Token]]:
        """Keep the result, and return what each rank may send as known in the next save."""
        with self._lock:
            self._planned[key] = planned
            self._planned.move_to_end(key)
            while len(self._planned) > _STRUCTURES_MAX:
                self._planned.popitem(last=False)
            self._promised = [
                frozenset(one.token for plan in self._planned.values() for one in plan.of_rank(r))
                for r in range(len(planned.given))
            ]
            return self._promised

    def promised(self, rank: int) -> frozenset[Token]:
        """Return the contents that a rank has, if it received the last answer."""
        return self._promised[rank] if rank < len(self._promised) else frozenset()


def part_of(items: object, paths: object) -> Part | None:
    """Return the contents of a plan; None if another planner made it, or it was changed."""
    content = items.unchanged() if type(items) is Items else None
    if content is None:
        return None
    if paths is None:
        return Part(content, None)
    of_paths = paths.unchanged() if type(paths) is Table else None
    return None if of_paths is None else Part(content, of_paths)


def plan_part(items: list[WriteItem], paths: Mapping[str, Any] | None) -> Part:
    """Return the contents of a new plan."""
    return _part(_plan_columns.write_items(items), paths)


def metadata_part(metadata: Metadata) -> Part:
    """Return the contents of metadata that a planner has made."""
    stored = _plan_columns.stored_content(metadata.state_dict_metadata)
    return _part(stored, metadata.planner_data)


def _part(first: Content, paths: Mapping[str, Any] | None) -> Part:
    names = first.columns[0]  # shared by both, so that it is sent once
    return Part(first, None if paths is None else _plan_columns.paths_content(paths, names))


class _Alone:
    """Replaces the process group in a process that saves alone."""


_ALONE = _Alone()

# The caches, by process group and coordinator.
_memories: weakref.WeakKeyDictionary[Any, dict[int, Memory]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # re-entrant: a signal handler may save, too


def memory_here() -> Memory:
    """Return the cache of the process group of the ``dcp.save`` that calls this.

    A new cache if the group is unknown.
    """
    meeting = _private.save_meeting()
    if meeting is None:
        return Memory()
    with _lock:
        try:
            of_group = _memories.setdefault(meeting.group if meeting.use_dist else _ALONE, {})
        except TypeError:  # a process group of a class without weak references
            return Memory()
        return of_group.setdefault(meeting.coordinator_rank, Memory())


def is_of_all(plans: Sequence[object]) -> bool:
    """Return, on the coordinator, whether these are the plans of all ranks of a save."""
    meeting = _private.save_meeting()
    if meeting is None:
        return False
    if not meeting.use_dist:
        return True
    is_here = dist.get_rank(meeting.group) == meeting.coordinator_rank
    return is_here and len(plans) == dist.get_world_size(meeting.group)
