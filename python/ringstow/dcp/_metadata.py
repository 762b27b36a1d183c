"""Converts a checkpoint's manifest to DCP's Metadata and back. Pure: no I/O.

DCP uses flat names (``"optimizer.state.0.step"``) and keeps the path of each in ``planner_data``.
The manifest has a tree of values instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ringstow._core._errors import Error, FormatError, UnsupportedError
from ringstow._state.tensors import _torch
from ringstow._state.tensors._memory import in_elements
from ringstow._state.tree import _build, _skeleton
from ringstow._state.tree._encode import Json
from ringstow._state.tree._skeleton import DEPTH_MAX
from ringstow._state.tree._walk import COMPOSITE, STORED, Box, Leaf, NoKeyError, leaves, rebuild_key
from ringstow.dcp._containers import Container, Containers, Path, Step

Shape = tuple[int, ...]

_log = logging.getLogger("ringstow")

# A list with up to this many gaps gets empty dicts in them; with more gaps it becomes a dict.
_GAPS_MAX = 4096

# An attribute of DCP's Metadata that only ringstow uses.
_DROPPED = "ringstow_dropped"

_NOTHING = _build.Contents("", lambda _: None)


class _Branch(dict[Step, Any]):
    """A container of the state: a dict if its keys are str, a list if they are int."""

    note: Container | None = None
    """The information that flat names lose of it."""
    late: dict[Step, int] | None = None
    """The items that no flat name leads to, with their positions."""

    def settle(self) -> None:
        """Put each item back at its position."""
        if self.late:
            items = [(step, item) for step, item in self.items() if step not in self.late]
            for step, position in sorted(self.late.items(), key=operator.itemgetter(1)):
                items.insert(position, (step, self[step]))
            self.clear()
            self.update(items)


class Notes(NamedTuple):
    """What the ranks have noted of values whose trees Metadata lacks."""

    containers: Containers
    trees: dict[str, str]
    """The trees of tensors that are made of others, by flat name."""


def tree_of(metadata: Metadata, notes: Notes | None = None) -> str:
    """Return the JSON tree of a checkpoint's values.

    The tree is nested by the default planner's ``planner_data``; it is flat if that has another
    type, lacks a name, or contradicts itself. A nested tree has the containers that the ranks have
    noted.
    """
    leaves: dict[str, Json] = {
        name: {"$object" if isinstance(stored, BytesStorageMetadata) else "$tensor": name}
        for name, stored in metadata.state_dict_metadata.items()
    }
    containers, trees = notes or Notes({}, {})
    leaves |= {name: json.loads(tree) for name, tree in trees.items() if name in leaves}
    root = _nested(leaves, metadata.planner_data)
    if root is None:
        root = _Branch(leaves)
    else:
        _mark(root, containers)
    return json.dumps(_json(root), ensure_ascii=False, separators=(",", ":"))


def _nested(leaves: Mapping[str, Json], paths: object) -> _Branch | None:
    if not isinstance(paths, Mapping) or not leaves.keys() <= paths.keys():
        return None
    root = _Branch()
    for name, path in paths.items():  # they have the order of the state; ranks write parts of it
        if name not in leaves:
            continue
        at = _branch(root, path[:-1]) if _is_path(path) else None
        if at is None or path[-1] in at:
            return None
        at[path[-1]] = leaves[name]
    return root


def _branch(root: _Branch, path: Path) -> _Branch | None:
    """Return the container at a path; None if another rank has a value on the way."""
    at = root
    for step in path:
        at = at.setdefault(step, _Branch())
        if not isinstance(at, _Branch):
            return None
    return at


def _mark(root: _Branch, notes: Containers) -> None:
    """Put notes at their containers, and add the containers that no flat name leads to."""
    for path in sorted(notes, key=len):
        note, above = notes[path], _branch(root, path[:-1])
        if above is None:
            continue
        if path and note.position is not None and path[-1] not in above:
            above.late = above.late or {}
            above.late[path[-1]] = note.position
        at = _branch(root, path)
        if at is not None and note.tag != "list":
            at.note = note


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, tuple)
        and 0 < len(path) <= DEPTH_MAX
        and all(type(step) in (str, int) for step in path)
        and type(path[0]) is str
    )


def _json(node: Any) -> Json:
    if not isinstance(node, _Branch):
        return node  # type: ignore[no-any-return]
    node.settle()
    steps = [step for step in node if type(step) is int]
    if node.note is not None and not steps:
        return node.note.tree({str(step): _json(child) for step, child in node.items()})
    if steps and len(steps) == len(node) and min(steps) >= 0:
        length = max(steps) + 1
        if length - len(node) <= _GAPS_MAX:
            # Empty dicts have no leaves, so a list may have gaps.
            return [_json(node[index]) if index in node else {} for index in range(length)]
    if not steps and not any(str(step).startswith("$") for step in node):
        return {str(step): _json(child) for step, child in node.items()}
    return {"$dict": [[step, _json(child)] for step, child in node.items()]}


def note_dropped(metadata: Metadata, names: tuple[str, ...]) -> None:
    """Note which parts `slim` has dropped from a checkpoint, for ringstow's planner."""
    setattr(metadata, _DROPPED, names)


def dropped_from(metadata: Metadata) -> tuple[str, ...]:
    """Return the parts that `slim` has dropped from a checkpoint, as far as known."""
    names: tuple[str, ...] = getattr(metadata, _DROPPED, ())
    return names


class Entry(NamedTuple):
    """One tensor or object of a checkpoint."""

    name: str
    """The name in the manifest. Tied tensors have one name here and several flat names."""
    dtype: str
    """safetensors' name of the element type."""
    shape: Shape
    """Shape of the complete tensor, in elements of that type."""
    is_object: bool
    chunks: list[tuple[Shape, Shape]]
    """Offsets and sizes, in elements of that type."""
    holes: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    """Offsets and sizes of the regions that one rank's part of a checkpoint leaves out."""

    def lacks(self, item: ReadItem) -> bool:
        """Return whether the chunk that a planner asks for lacks some of its elements."""
        chunk = self.chunk_of(item.storage_index)
        if chunk is None:
            return True
        ends = (o + n for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        sizes = self.chunks[chunk][1]
        return any(e > n for e, n in zip(in_elements(tuple(ends), self.dtype), sizes, strict=True))

    def chunk_of(self, index: MetadataIndex) -> int | None:
        """Return the number of the chunk that DCP means; None if it is missing."""
        offset = in_elements(tuple(index.offset or ()), self.dtype)
        hint = index.index
        if hint is not None and hint < len(self.chunks) and self.chunks[hint][0] == offset:
            return hint
        return next((n for n, chunk in enumerate(self.chunks) if chunk[0] == offset), None)


@dataclasses.dataclass
class Contents:
    """A checkpoint's tensors and objects, by flat name."""

    path: str
    entries: dict[str, Entry]
    paths: dict[str, Path]
    values: dict[str, Any]
    """Skeletons of values that are objects for DCP and that ``ringstow.save`` kept in the tree."""
    twice: set[str]
    """The flat names of several values, such as ``{5: 1, "5": 2}``."""

    @classmethod
    def of(cls, path: str, rows: list[Any], state: str | None) -> Contents:
        """Build the table from the native side's entries and the JSON tree, if there is one.

        Raises:
            FormatError: the tree is damaged, or does not fit the entries.
        """
        entries = {row[0]: Entry(*row) for row in rows}
        contents = cls(path, {}, {}, {}, set())
        placed: set[str] = set()
        tree = {} if state is None else _skeleton.parse(state, path)
        for place, node in _walk(tree, ()):
            names = [leaf.body for leaf in _stored_in(node)]
            for name in names:
                if name not in entries:
                    raise FormatError(
                        f"{path}: the state names {name!r}, which the manifest does not list",
                        path=path,
                    )
            placed.update(names)
            contents._add(place, node, entries)
        for name, entry in entries.items():
            # A Counter's counts are also in the tree.
            if name not in placed and name not in contents.paths:
                contents.entries[name], contents.paths[name] = entry, (name,)
        return contents

    def _add(self, place: Path, node: Any, entries: Mapping[str, Entry]) -> None:
        flat = ".".join(map(str, place))
        is_entry = _is_item(node)
        if flat in self.paths:  # two paths with one flat name: {"a.b"}, {"a": {"b"}}
            if not is_entry or self.entries.get(flat) is not entries[node.body]:
                self.twice.add(flat)
            if not is_entry:
                return
            flat, place = node.body, (node.body,)
        self.paths[flat] = place
        if is_entry:
            self.entries[flat] = entries[node.body]
        else:
            self.values[flat] = node

    def metadata(self, *, allow_pickle: bool = False) -> Metadata:
        """Return DCP's metadata; ``storage_data`` stays None."""
        stored: dict[str, Any] = {}
        for name, node in self.values.items():
            if allow_pickle or not any(leaf.tag == "$pickle" for leaf in _leaves_in(node)):
                stored[name] = BytesStorageMetadata()
            else:
                _log.warning(
                    "%s: %s was saved with pickle and is left out: loading it can run any code, "
                    "and needs StorageReader(allow_pickle=True)",
                    self.path,
                    name,
                )
        kinds: dict[Any, TensorStorageMetadata] = {}
        for name, entry in self.entries.items():
            try:
                stored[name] = _stored(name, entry, kinds)
            except UnsupportedError as error:  # a load reports it as missing
                _log.warning("%s: %s; it is left out", self.path, error)
        return Metadata(
            stored,
            planner_data={name: self.paths[name] for name in stored},
            storage_meta=StorageMeta(checkpoint_id=self.path),
        )


def _stored(
    name: str, entry: Entry, kinds: dict[Any, TensorStorageMetadata]
) -> BytesStorageMetadata | TensorStorageMetadata:
    """Return DCP's metadata of an entry; entries of one kind share its parts."""
    if entry.is_object:
        return BytesStorageMetadata()
    # Include holes as chunks, so that a planner asks for them and the load can refuse.
    regions = tuple((tuple(o), tuple(n)) for o, n in (*entry.chunks, *entry.holes))
    mark = (entry.dtype, tuple(entry.shape), regions)
    kind = kinds.get(mark)
    if kind is None:
        properties = TensorProperties(dtype=_torch.dtype_of(entry.dtype, name))
        whole = _chunk((0,) * len(entry.shape), entry.shape, entry.dtype)
        chunks = [_chunk(*region, entry.dtype) for region in regions]
        kind = kinds[mark] = TensorStorageMetadata(properties, whole.sizes, chunks)
    return TensorStorageMetadata(kind.properties, kind.size, list(kind.chunks))


def _chunk(offsets: Sequence[int], sizes: Sequence[int], dtype: str) -> ChunkStorageMetadata:
    """Return a region as one of torch's chunks; a hole is rounded up to pairs of 4-bit elements."""
    first, ends = list(offsets), [o + n for o, n in zip(offsets, sizes, strict=True)]
    if dtype == "F4" and ends:
        first[-1], ends[-1] = first[-1] // 2, -(-ends[-1] // 2)
    lengths = (end - o for o, end in zip(first, ends, strict=True))
    return ChunkStorageMetadata(torch.Size(first), torch.Size(lengths))


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the skeleton of each value that DCP does not flatten."""
    if isinstance(node, Leaf) and node.tag == "$counter":
        node = node.body
    if isinstance(node, dict):
        for key, child in node.items():  # DCP has only str keys in a dict
            text = key if type(key) is str else _text_of(key)
            yield from _walk(child, (*path, text))
    elif isinstance(node, list) and _is_walked(node):
        for index, child in enumerate(node):
            yield from _walk(child, (*path, index))
    else:
        yield path, node


def _text_of(key: Any) -> str:
    """Return DCP's text for a key."""
    if type(key) in (Leaf, Box, tuple):
        # The program's state cannot have a key of a type that the program lacks.
        with contextlib.suppress(Error, NoKeyError):
            return str(rebuild_key(key, (), _build.Builder(_NOTHING, {}).make, ()))
    return str(key)


def _is_walked(items: list[Any]) -> bool:
    """Return whether DCP flattens a list: only lists with tensors or dicts."""
    return any(
        isinstance(item, dict) or _is_tensor(item) or (isinstance(item, list) and _is_walked(item))
        for item in items
    )


def _is_item(node: Any) -> bool:
    """Return whether a leaf is an item for DCP too; an array is not."""
    return isinstance(node, Leaf) and node.tag in ("$tensor", "$object")


def _is_tensor(node: Any) -> bool:
    """Return whether a node is a tensor for DCP, too: then DCP flattens the list around it."""
    return _is_item(node) or (isinstance(node, Box) and node.tag == COMPOSITE)


def _leaves_in(node: Any) -> Iterator[Leaf]:
    return (leaf for _, leaf in leaves(node) if isinstance(leaf, Leaf))


def _stored_in(node: Any) -> Iterator[Leaf]:
    return (leaf for leaf in _leaves_in(node) if leaf.tag in STORED)
