"""Plans what one rank must write, cheaply: a name and a kind for each value of a flat state.

Torch makes the items of one value of each kind. All values of the kind share these items except the
name. A kind is everything that an item depends on: shape, placements, mesh, dtype, strides and so
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from ringstow.dcp import _layout_keys, _stand_ins

_KINDS_MAX = 65536


class Template(NamedTuple):
    """A `WriteItem` without its name."""

    type: WriteItemType
    offset: torch.Size | None
    hint: int | None
    bytes_io_data: BytesIOWriteData | None
    tensor_data: TensorWriteData | None

    @classmethod
    def of(cls, item: WriteItem) -> Template:
        """Return the template of an item."""
        index = item.index
        return cls(item.type, index.offset, index.index, item.bytes_io_data, item.tensor_data)

    def item(self, name: str) -> WriteItem:
        """Return the item of a name."""
        index = MetadataIndex(name, self.offset, self.hint)
        return WriteItem(index, self.type, self.bytes_io_data, self.tensor_data)


Kind = tuple[Template, ...]
"""The items of one value: usually one; none for a tensor whose mesh does not have this rank."""


class Outline(NamedTuple):
    """The names and kinds that a rank must write. Equal outlines have equal items."""

    names: list[str]
    kinds: list[Kind]

    def items(self) -> list[WriteItem]:
        """Return the items, in the order of torch's planner."""
        pairs = zip(self.names, self.kinds, strict=True)
        return [template.item(name) for name, kind in pairs for template in kind]


_kinds: dict[tuple[Any, ...], Kind] = {}


def outline(state: Mapping[str, Any], *, is_coordinator: bool, stands_in: bool) -> Outline:
    """Return the outline of what a rank must write of a flat state.

    Args:
        state: the state.
        is_coordinator: whether this rank plans for all.
        stands_in: whether to plan `_stand_ins` of tensors that torch can't plan.

    Raises:
        Exception: an error of torch's planner for a value.
    """
    if len(_kinds) >= _KINDS_MAX:
        _kinds.clear()
    look = _layout_keys.Look()
    grad = torch.is_grad_enabled()
    kinds: list[Kind] = []
    with torch.no_grad():
        marks = [
            _mark(value, look.layout(value), (grad, is_coordinator, stands_in))
            for value in state.values()
        ]
    for (name, value), mark in zip(state.items(), marks, strict=True):
        kind = None if mark is None else _kinds.get(mark)
        if kind is None:
            empty = _stand_ins.of(value) if stands_in else None
            plan = create_default_local_save_plan(
                {name: value if empty is None else empty}, is_coordinator
            )
            kind = tuple(map(Template.of, plan.items))
            if mark is not None:
                _kinds[mark] = kind
        kinds.append(kind)
    return Outline(list(state), kinds)


def _mark(
    value: Any, layout: tuple[Any, ...] | None, call: tuple[bool, ...]
) -> tuple[Any, ...] | None:
    """Return the kind of a value; None for a value to plan separately.

    Args:
        value: the value.
        layout: the key of its layout.
        call: other inputs of a plan: whether autograd records, whether this rank is the
            coordinator, and whether stand-ins are planned.
    """
    if layout is None:
        return None
    if layout[0] is None:
        return layout, call
    local = value.to_local() if layout[0] is DTensor else value
    return (
        layout,
        call,
        value.requires_grad,
        local.requires_grad,
        local.dtype,
        local.layout,
        local.stride() if local.layout == torch.strided else None,
        local.is_pinned(),
    )
