"""A load planner that names all differences before anything is loaded."""

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

from ringstow.dcp._metadata import dropped_from
from ringstow.tree._select import by_slim, check_match


class LoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, except that it names all keys that do not fit, not only the first.

    ::

        dcp.load(state, storage_reader=reader, planner=ringstow.dcp.LoadPlanner())

    Torch's planner stops at the first key that is missing or has another shape, and ignores keys
    that only the checkpoint has.
    """

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

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan.

        Raises:
            KeyMismatchError: names every key that is missing, unexpected or different.
        """
        if self.metadata is not None:
            self._check(self.metadata)
        return super().create_local_plan()

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
