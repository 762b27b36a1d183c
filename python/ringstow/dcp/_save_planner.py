"""A save planner that makes torch's plans quickly, and reuses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from ringstow._core._gc_pause import collector_paused
from ringstow._state.tree import _cycles
from ringstow.dcp import _plan_cache, _plan_columns, _plan_transfer, _private
from ringstow.dcp._plan_cache import Memory, Mine, Part, Planned
from ringstow.dcp._plan_transfer import Content, Items, Table
from ringstow.dcp._write_plan import outline

_STEPS = ("create_local_plan", "create_global_plan", "finish_plan")


class SavePlanner(DefaultSavePlanner):
    """Torch's default planner, except that it is faster with many tensors.

    ::

        planner = ringstow.dcp.SavePlanner()
        dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(path), planner=planner)

    Plans and Metadata equal those of torch's planner. If the state has the same structure as in one
    of the last two saves of its process group, no plan is sent: the ranks agree on that in the
    messages that DCP sends anyway. If the structure of one rank changes, that rank sends its plan,
    and all ranks get new plans. The process keeps the plans, so each save may have a planner of its
    own.

    A subclass that overrides ``create_local_plan``,
    ``create_global_plan`` or ``finish_plan`` plans as torch's planner does, without its speed.
    """

    _is_plain = False
    """Whether the class takes part in planning itself."""

    # For the save in progress: the process's cache, and this rank's plan.
    _under_way: tuple[Memory, Mine] | None = None
    # Held until the coordinator has sent the Metadata.
    _received: Sequence[Content] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_plain = _private.overrides(cls, SavePlanner, _STEPS)

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        """Make a planner.

        Args:
            flatten_state_dict: flatten nested containers; the same as in torch.
            flatten_sharded_tensors: flatten nested sharded tensors; the same as in torch.
            dedup_replicated_tensors: no effect; the same as in torch.
            dedup_save_to_lowest_rank: let the lowest rank write a replicated tensor, instead of
                the least loaded rank; the same as in torch.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without this process's cache of earlier plans."""
        here = ("_under_way", "_received")
        return {name: value for name, value in vars(self).items() if name not in here}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict, as in torch.

        Raises:
            InvalidStateError: a value contains itself; names its key.
        """
        with collector_paused(), _cycles.naming_cycles(state_dict):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan."""
        if self._is_plain:
            return super().create_local_plan()
        with collector_paused():
            seen = outline(
                self.state_dict,
                is_coordinator=self.is_coordinator,
                stands_in=_private.is_saved_by_ringstow(),
            )
            memory = _plan_cache.memory_here()
            paths = self.mappings if self.flatten_state_dict else None
            known = memory.begin()
            mine = next((one for one in known if _is_of(one, seen, paths)), None)
            is_known = mine is not None
            if mine is None:
                mine = Mine(seen, _plan_cache.plan_part(seen.items(), paths))
        self._under_way = memory, mine
        self._received = _plan_transfer.received()
        note = frozenset(one.token for one in self._received)
        self.plan = _plan(SavePlan([]), mine.part, is_known=is_known, has_paths=is_known, note=note)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return each rank's final plan and the metadata, on the coordinator.

        Raises:
            ValueError: torch finds errors in the plans, such as overlapping shards.
            Error: a rank has sent a plan as known that the coordinator does not have.
        """
        for plan in all_plans:
            _plan_transfer.check(plan.items)
        given = [_plan_cache.part_of(plan.items, plan.planner_data) for plan in all_plans]
        parts = [part for part in given if part is not None]
        if self._is_plain or self._under_way is None or len(parts) < len(all_plans):
            return super().create_global_plan(all_plans)
        memory, mine = self._under_way
        with collector_paused():
            # Without collectives each rank plans for itself, and no rank caches others' plans.
            is_shared = _plan_cache.is_of_all(all_plans)
            memory = memory if is_shared else Memory()
            tokens = tuple(one.token for part in parts for one in part.contents())
            key = (type(self), self.flatten_state_dict, self.dedup_save_to_lowest_rank, tokens)
            planned = memory.recall(key) or self._planned(all_plans, parts)
            had = [memory.promised(rank) for rank in range(len(all_plans))]
            promises = memory.promise(key, planned) if is_shared else [frozenset()] * len(had)
            self.global_plan = [
                _answer(*each)
                for each in zip(all_plans, planned.answers, had, promises, strict=True)
            ]
            has_metadata = _has_metadata(all_plans, planned, mine)
            self.metadata = planned.new_metadata(is_known=has_metadata)
        return self.global_plan, self.metadata

    def _planned(self, all_plans: list[SavePlan], given: list[Part]) -> Planned:
        """Plan as torch does."""
        plans, metadata = super().create_global_plan(all_plans)
        answers = [
            part._replace(items=_plan_columns.write_items(plan.items))
            for plan, part in zip(plans, given, strict=True)
        ]
        return Planned(given, answers, _plan_cache.metadata_part(metadata))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's final plan.

        Raises:
            Error: the coordinator has sent a plan as known that this rank does not have.
        """
        _plan_transfer.check(new_plan.items)
        if self._is_plain:
            return super().finish_plan(new_plan)
        if self._under_way is not None:
            memory, mine = self._under_way
            items = new_plan.items
            note = items.note if type(items) is Items else None
            answer = _plan_cache.part_of(items, new_plan.planner_data)
            memory.heard(mine, answer, note or frozenset())
            self._under_way = None
        self.plan = new_plan
        return new_plan


def _is_of(mine: Mine, seen: Any, paths: dict[str, Any] | None) -> bool:
    known = mine.part.paths
    if known is None or paths is None:
        return mine.outline == seen and known is None and paths is None
    return bool(mine.outline == seen and known.made == paths)


def _has_metadata(all_plans: list[SavePlan], planned: Planned, mine: Mine) -> bool:
    """Return whether all ranks except the coordinator have the metadata from an earlier save."""
    tokens = {one.token for one in planned.metadata.contents()}
    return all(
        part.items is mine.part.items or tokens <= plan.items.note
        for plan, part in zip(all_plans, planned.given, strict=True)
        if isinstance(plan.items, Items)
    )


def _answer(plan: SavePlan, part: Part, had: frozenset[str], promise: frozenset[str]) -> SavePlan:
    """Return a rank's final plan, as a token if the rank has it."""
    items = plan.items
    assert isinstance(items, Items)
    is_known = items.is_known and part.items.token in had
    return _plan(plan, part, is_known=is_known, has_paths=True, note=promise)


def _plan(
    plan: SavePlan, part: Part, *, is_known: bool, has_paths: bool, note: frozenset[str]
) -> SavePlan:
    """Return a plan with other items and paths; the receiver may already have either."""
    paths = None if part.paths is None else Table.over(part.paths, is_known=has_paths)
    items = Items.over(part.items, is_known=is_known, note=note)
    return dataclasses.replace(plan, items=items, planner_data=paths)
