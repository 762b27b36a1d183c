"""A load planner that names all differences before anything is loaded, and plans fast."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from ringstow._collector import collector_paused
from ringstow.dcp import _columns, _private, _travel
from ringstow.dcp._metadata import dropped_from
from ringstow.dcp._read_items import read_items
from ringstow.dcp._travel import Content, Items
from ringstow.tree._select import by_slim, check_match

_STEPS = ("create_local_plan", "create_global_plan", "finish_plan")


class LoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, except that it names all keys that do not fit, not only the first.

    ::

        dcp.load(state, storage_reader=reader, planner=ringstow.dcp.LoadPlanner())

    Torch's planner stops at the first key that is missing or has another shape, and ignores keys
    that only the checkpoint has.

    The plans are those of torch's planner. With many tensors they take less time, since torch plans
    one tensor of each layout, and plans travel in columns, or not at all if nobody else reads them.
    A class that is derived from this one and overrides ``create_local_plan``,
    ``create_global_plan`` or ``finish_plan`` plans as torch's planner does, without its speed.
    """

    _is_plain = False
    """Whether the class takes part in planning itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_plain = _private.overrides(cls, LoadPlanner, _STEPS)

    elsewhere: Collection[str] = ()
    """Keys of other ranks' state dicts: only the checkpoint has them here, and that is right."""
    may_hold_more = False
    """Whether the checkpoint may hold any other keys."""

    def __init__(
        self,
        *,
        strict: bool = True,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        """Make a planner.

        Args:
            strict: the state dict and the checkpoint must hold the same keys. False loads the keys
                in both; a tensor of another shape is still an error.
            flatten_state_dict: as in torch.
            flatten_sharded_tensors: as in torch.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=not strict,
        )
        self._strict = strict
        self._flattens = flatten_sharded_tensors
        self._planned: Content | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict, as in torch."""
        with collector_paused():
            # Torch would flatten it twice, and take a gap for an empty dict in a list.
            self.flatten_sharded_tensors = self._flattens and _private.holds_sharded(state_dict)
            super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan.

        Raises:
            KeyMismatchError: names every key that is missing, unexpected or different.
        """
        if self.metadata is not None:
            self._check(self.metadata)
        if self._is_plain or self.metadata is None or self._may_be_old(self.metadata):
            return super().create_local_plan()
        with collector_paused():
            items = read_items(self.state_dict, self.metadata, strict=not self.allow_partial_load)
            # Kept: the plan may come back as a token.
            self._planned = _columns.read_items(items)
        return LoadPlan(Items.over(self._planned))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks as they are, on the coordinator."""
        if not self._is_plain:
            for plan in global_plan:
                _travel.leave_here(plan.items)  # the rank that gets it back has it
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's final plan.

        Raises:
            Error: the coordinator has sent what this rank does not have.
        """
        _travel.check(new_plan.items)
        self._planned = None
        return super().finish_plan(new_plan)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_planned": None}

    def _may_be_old(self, metadata: Metadata) -> bool:
        """Tell whether a torch before 2.4 may have saved the checkpoint, with other flat names."""
        if not self.flatten_state_dict:
            return False
        missing = metadata.state_dict_metadata.keys() - self.state_dict.keys()
        if not missing:
            return False
        keys = _private.keys_before_2_4(self.original_state_dict)
        return keys is None or not keys.isdisjoint(missing)

    def _check(self, metadata: Metadata) -> None:
        saved, wanted = metadata.state_dict_metadata, self.state_dict
        missing = [name for name in wanted if name not in saved] if self._strict else []
        known = {*wanted, *self.elsewhere}
        is_exact = self._strict and not self.may_hold_more
        unexpected = [name for name in saved if name not in known] if is_exact else []
        pairs = ((name, wanted[name], saved[name]) for name in wanted if name in saved)
        mismatched = [text for pair in pairs if (text := _difference(*pair))]
        path = str(getattr(metadata.storage_meta, "checkpoint_id", None) or "the checkpoint")
        lost = by_slim(missing, dropped_from(metadata))
        check_match(path, missing, unexpected, mismatched, *lost)


def _difference(name: str, here: Any, there: Any) -> str | None:
    """Return the difference that keeps a saved value from being loaded into another; or None."""
    if isinstance(there, BytesStorageMetadata):
        if isinstance(here, torch.Tensor):
            return f"{name} is a tensor here and an object in the checkpoint"
        return None
    if not isinstance(here, torch.Tensor):
        return f"{name} is a {type(here).__name__} here and a tensor in the checkpoint"
    assert isinstance(there, TensorStorageMetadata)
    shape = torch.Size(getattr(here, "global_shape", here.size()))
    if shape != there.size:
        return f"{name} is {list(shape)} here and {list(there.size)} in the checkpoint"
    return None
