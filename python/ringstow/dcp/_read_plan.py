"""Plans what one rank must read, cheaply: torch plans one value of each kind.

A kind is everything except the name that a value's items depend on: its layout here, and its layout
in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from ringstow.dcp import _layout_keys


class ReadTemplate(NamedTuple):
    """A `ReadItem` without its name."""

    type: LoadItemType
    dest: tuple[torch.Size | None, int | None]
    dest_offsets: torch.Size
    storage: tuple[torch.Size | None, int | None]
    storage_offsets: torch.Size
    lengths: torch.Size

    @classmethod
    def of(cls, item: ReadItem) -> ReadTemplate:
        """Return the template of an item."""
        dest, storage = item.dest_index, item.storage_index
        return cls(
            item.type,
            (dest.offset, dest.index),
            item.dest_offsets,
            (storage.offset, storage.index),
            item.storage_offsets,
            item.lengths,
        )

    def item(self, name: str) -> ReadItem:
        """Return the item of a name."""
        return ReadItem(
            self.type,
            MetadataIndex(name, *self.dest),
            self.dest_offsets,
            MetadataIndex(name, *self.storage),
            self.storage_offsets,
            self.lengths,
        )


def read_items(state: Mapping[str, Any], metadata: Metadata, *, strict: bool) -> list[ReadItem]:
    """Return the items that a rank must read into a flat state, in the order of torch's planner.

    Raises:
        RuntimeError: torch's error for a name that the checkpoint lacks, if strict.
        ValueError: torch's error for a tensor of another size.
        Exception: any other error of torch's planner for a value.
    """
    kinds: dict[Any, list[ReadTemplate]] = {}
    items: list[ReadItem] = []
    look = _layout_keys.Look()
    with torch.no_grad():
        marks = [look.layout(value) for value in state.values()]
    for (name, value), layout in zip(state.items(), marks, strict=True):
        mark = _mark(metadata.state_dict_metadata.get(name), layout)
        templates = None if mark is None else kinds.get(mark)
        if templates is None:
            made = create_default_local_load_plan({name: value}, metadata, strict).items
            items += made
            if mark is not None:
                kinds[mark] = [ReadTemplate.of(item) for item in made]
        else:
            items += [template.item(name) for template in templates]
    return items


def _mark(stored: Any, layout: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the kind of a value; None for a value to plan separately."""
    if layout is None:
        return None
    if isinstance(stored, TensorStorageMetadata):
        chunks = tuple([(chunk.offsets, chunk.sizes) for chunk in stored.chunks])
        return layout, stored.size, chunks
    # Torch skips a DTensor whose mesh does not have this rank.
    is_usual = isinstance(stored, BytesStorageMetadata) and layout[0] is not DTensor
    return (BytesStorageMetadata,) if is_usual else None
