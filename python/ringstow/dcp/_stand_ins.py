"""Tensors for torch's planner in place of those that it can't plan: sparse ones, jagged ones.

A plan says of a tensor that is made of others only that there is one. Torch's planner asks more:
whether it is pinned, its storage, the bytes of an element. Some types have no answer. So it plans
an empty tensor of the same shape, and the writer gets the tensor itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.tensor import DTensor

from ringstow._state.tensors import _composites, _shards, _torch

_DTYPES = frozenset(vars(torch)[name] for name in _torch.CODES if name in vars(torch))


def of(value: Any) -> torch.Tensor | None:
    """Return a stand-in for a value; None if torch can plan the value itself, or no save takes it.

    A DTensor's has the same place on each rank.
    """
    local = _shards.local_of(value) if isinstance(value, DTensor) else value
    if not isinstance(local, torch.Tensor) or _is_usual(local):
        return None
    if not _composites.is_composite(local) or _can_plan(local):
        return None
    shape = tuple(size if type(size) is int else 1 for size in local.shape)  # jagged: a symbol
    dtype = local.dtype if local.dtype in _DTYPES else torch.uint8
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return _shards.dtensor_like(value, empty) if isinstance(value, DTensor) else empty


def _is_usual(tensor: torch.Tensor) -> bool:
    return (
        _torch.is_of_torch(tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and not tensor.is_nested
    )


def _can_plan(tensor: torch.Tensor) -> bool:
    try:
        (item,) = create_default_local_save_plan({"": tensor}, is_coordinator=True).items
        item.tensor_storage_size()
        sizes = () if item.tensor_data is None else item.tensor_data.size
    except Exception:  # the type's own code
        return False
    return all(type(size) is int for size in sizes)


class Planning:
    """Lets torch's own planner plan a state with stand-ins, on one rank."""

    def __init__(self, planner: object) -> None:
        """Replace the tensors that the planner can't plan, once it has been set up.

        Nothing is replaced for `SavePlanner`, which does so itself, and planners of other kinds.
        """
        self._planner: DefaultSavePlanner | None = None
        if not isinstance(planner, DefaultSavePlanner) or not getattr(planner, "_is_plain", True):
            return
        found = {name: of(value) for name, value in planner.state_dict.items()}
        if any(one is not None for one in found.values()):
            self._planner, self._state = planner, planner.state_dict
            planner.state_dict = {
                name: value if (one := found[name]) is None else one
                for name, value in self._state.items()
            }

    def end(self) -> None:
        """Give the planner its state back, once it has planned."""
        if self._planner is not None:
            self._planner.state_dict = self._state
            self._planner = None
