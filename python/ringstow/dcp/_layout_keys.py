"""How a usual value of a state is laid out on this rank, as a key that equals that of its like."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN = ("global_shape", "__create_write_items__", "__create_chunk_list__")


class Look:
    """Looks at the values of one state, which lives meanwhile."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        """This rank's number in each mesh, by the mesh's id."""

    def layout(self, value: Any) -> tuple[Any, ...] | None:
        """Return class, shape, and placements; None for a value that is laid out in its own way.

        Call it without autograd.
        """
        kind = type(value)
        if kind is DTensor:
            if is_own(value.to_local()):
                return None
            mesh = value.device_mesh
            rank = self._ranks.get(id(mesh))
            if rank is None:
                # A mesh equals one of an earlier process group, where this rank had another number.
                rank = self._ranks[id(mesh)] = mesh.get_rank()
            return kind, value.shape, value.placements, mesh, rank
        if kind in _PLAIN:
            return None if is_own(value) else (kind, value.shape)
        if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        return (None,)


def is_own(local: Any) -> bool:
    """Tell whether a local tensor says itself which parts of a whole it has."""
    return type(local) not in _PLAIN or any(hasattr(local, name) for name in _OWN)
