"""The tensors of a state, and torch.load's ``map_location`` for those loaded to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringstow._core._arguments import brief
from ringstow.integrations._kit._values import tensors_of

Move = Callable[[Any, str], Any]
"""Returns the storage to use in place of one that is at a location, or None to keep it."""


def stay(storage: Any, location: str) -> Any:
    """Keep a storage on the CPU, where it was loaded."""
    return storage


def resolve(map_location: Any) -> tuple[str | None, Move | None]:
    """Return the device to load to, and the function that then moves storages, or None.

    Raises:
        TypeError: ``map_location`` is not a value that torch.load accepts.
    """
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return None, None
    if isinstance(map_location, str | torch.device):
        device = torch.device(map_location)
        if device.type in ("cpu", "cuda"):
            return str(device), None
        return None, lambda storage, _: storage.to(device=device)
    if callable(map_location):
        return None, map_location
    raise TypeError(
        "map_location is None, a device, its name, a dict of these or a callable, not "
        f"{brief(map_location)}"
    )


def apply(state: object, move: Move) -> None:
    """Move the tensors of a state, each storage once, so that tied tensors stay tied."""
    moved: dict[int, Any] = {}
    for tensor in tensors_of(state):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in moved:
            moved[key] = storage, move(storage, "cpu")
        new = moved[key][1]
        if new is None or new is storage:
            continue
        placed = torch.empty(0, dtype=tensor.dtype, device=new.device)
        placed.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = placed
