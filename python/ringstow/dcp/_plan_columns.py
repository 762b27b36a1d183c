"""Converts the lists and dicts of DCP's plans to columns, for sending, and back."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from ringstow.dcp._plan_transfer import Content
from ringstow.dcp._read_plan import ReadTemplate
from ringstow.dcp._write_plan import Template


def write_items(items: Iterable[WriteItem]) -> Content:
    """Return the content of a save plan's items."""
    return Content(_decode_items, made=list(items), encode=_encode_write_items)


def _encode_write_items(made: list[WriteItem]) -> Any:
    numbers: dict[tuple[Any, ...], int] = {}
    templates: list[Template] = []
    names: list[str] = []
    column = array.array("I")
    for item in made:
        index = item.index
        names.append(index.fqn)
        key = (item.type, index.offset, index.index, id(item.bytes_io_data), id(item.tensor_data))
        number = numbers.setdefault(key, len(templates))
        if number == len(templates):
            templates.append(Template.of(item))
        column.append(number)
    return names, column.tobytes(), templates


def read_items(items: Iterable[ReadItem]) -> Content:
    """Return the content of a load plan's items."""
    return Content(_decode_items, made=list(items), encode=_encode_read_items)


def _encode_read_items(made: list[ReadItem]) -> Any:
    numbers: dict[ReadTemplate, int] = {}
    names: list[str] = []
    column = array.array("I")
    for item in made:  # source and destination have the same name
        names.append(item.dest_index.fqn)
        column.append(numbers.setdefault(ReadTemplate.of(item), len(numbers)))
    return names, column.tobytes(), list(numbers)


def _decode_items(columns: Any) -> list[Any]:
    names, numbers, templates = columns
    column = array.array("I", numbers)
    return [templates[n].item(name) for name, n in zip(names, column, strict=True)]


def paths_content(paths: Mapping[str, Any], names: list[str] | None = None) -> Content:
    """Return the content of ``planner_data``: the path of each name in a nested state.

    Args:
        paths: the ``planner_data``.
        names: a list of its names that is sent too.
    """
    made = dict(paths)
    if names is None or names != list(made):
        names = list(made)
    odd = {name: path for name, path in made.items() if path != tuple(name.split("."))}
    return Content(_decode_paths, made=made, columns=(names, odd))


def _decode_paths(columns: Any) -> dict[str, Any]:
    names, odd = columns
    paths: dict[str, Any] = {name: tuple(name.split(".")) for name in names}
    paths.update(odd)
    return paths


def stored_content(stored: Mapping[str, Any]) -> Content:
    """Return the content of a ``state_dict_metadata``."""
    made = dict(stored)
    numbers: dict[Any, int] = {}
    kinds: list[Any] = []
    column = array.array("I")
    for one in made.values():
        key: Any = None
        if isinstance(one, TensorStorageMetadata):
            key = (id(one.properties), one.size, tuple(map(id, one.chunks)))
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            kinds.append(None if key is None else (one.properties, one.size, one.chunks))
        column.append(number)
    return Content(_decode_stored, made=made, columns=(list(made), column.tobytes(), kinds))


def _decode_stored(columns: Any) -> dict[str, Any]:
    names, numbers, kinds = columns
    pairs = ((name, kinds[n]) for name, n in zip(names, array.array("I", numbers), strict=True))
    return {
        name: BytesStorageMetadata()
        if kind is None
        else TensorStorageMetadata(kind[0], kind[1], list(kind[2]))
        for name, kind in pairs
    }
