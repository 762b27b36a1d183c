"""The layout of a common value on this rank, as a key that is equal for equal layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN = ("global_shape", "__create_write_items__", "__create_chunk_list__")


class Look:
    """Makes the keys of one state's values; the state must outlive it."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        """This rank's number in each mesh, by the mesh's id."""

    def layout(self, value: Any) -> tuple[Any, ...] | None:
        """Return class, shape and placements; None for a value with a layout of its own.

        Call it without autograd.
        """
        kind = type(value)
        if kind is DTensor:
            if is_own(value.to_local()):
                return None
            mesh = value.device_mesh
            rank = self._ranks.get(id(mesh))
            if rank is None:
                # A mesh may equal a mesh of an earlier process group, in which this rank had
                # another number.
                rank = self._ranks[id(mesh)] = mesh.get_rank()
            return kind, value.shape, value.placements, mesh, rank
        if kind in _PLAIN:
            return None if is_own(value) else (kind, value.shape)
        if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        return (None,)


def is_own(local: Any) -> bool:
    """Return whether a local tensor itself describes which parts of the whole it has."""
    return type(local) not in _PLAIN or any(hasattr(local, name) for name in _OWN)
