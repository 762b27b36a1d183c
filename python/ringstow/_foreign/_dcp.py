"""Reads checkpoints of torch.distributed.checkpoint's own format, a tensor at a time.

``.metadata`` is a pickle. A restricted unpickler reads it and creates only metadata classes.
"""

from __future__ import annotations

import collections
import functools
import io
import os
import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ringstow._core import _files
from ringstow._core._errors import FormatError, MissingFilesError, UnsupportedError
from ringstow._foreign._nested_states import State, spec_of
from ringstow._foreign._pickled_classes import Kept
from ringstow._foreign._pickles import (
    REMEDY,
    reading,
    refuse_collisions,
    refuse_pointer,
    unpickled,
    unreadable,
)
from ringstow._state import _torch_private
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _cycles
from ringstow._state.tree._dcp_containers import number_of
from ringstow._state.tree._skeleton import DEPTH_MAX

_METADATA = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
# The metadata classes, besides dtypes. Two names are from torch 2.0.
_KNOWN = {
    *(f"{_PACKAGE}.metadata.{name}" for name in metadata.__all__),
    f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING",
    f"{_PACKAGE}.filesystem._StorageInfo",
    # Megatron-Core keeps its plans.
    *(
        f"{_PACKAGE}.planner.{name}"
        for name in (
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        )
    ),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
}


# Elements of lists without a value: empty containers have none.
_GAPS_MAX = 1 << 20


class _MetadataUnpickler(pickle.Unpickler):
    """Creates only metadata classes, and refuses changes to them."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._kept = Kept()

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            if changed := self._kept.restore():
                raise UnsupportedError(
                    f"it changes {', '.join(changed[:5])}, which metadata never does. Do not load "
                    "it: who made it wanted to change your program"
                )

    def find_class(self, module: str, name: str) -> Any:
        # Not getattr, which makes torch import modules of its own.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if f"{module}.{name}" in _KNOWN:
            found = super().find_class(module, name)
            if isinstance(found, type):
                self._kept.note(found)
                return found
            # A function for this load only: a pickle can also change a function.
            return lambda *arguments: found(*arguments)
        raise UnsupportedError(
            f"it asks for {module}.{name}, which metadata never needs, so it is not unpickled: if "
            "you trust who wrote it, pass allow_pickle=True (--allow-pickle); it can run any code"
        )


def read(path: str, *, allow_pickle: bool) -> State:
    """Return the nested state of a checkpoint, with lazy tensors and all other values loaded.

    Raises:
        UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
        CorruptCheckpointError: a file is damaged.
        FormatError: the metadata is not DCP's.
    """
    # Unpickled objects may lack any attribute, and hold values of any type.
    with reading(os.path.join(path, ".metadata"), "the metadata"):
        reader = _Reader(path, allow_pickle)
        mappings = reader.metadata.planner_data or {}
        _check_lists(path, mappings)
        entries = reader.metadata.state_dict_metadata.items()
        return nested({name: reader.value(name, entry) for name, entry in entries}, mappings)


def nested(flat: Mapping[str, Any], mappings: Mapping[str, tuple[str | int, ...]]) -> State:
    """Return the nested state, and restore the parts of torch's own states that DCP loses."""
    state: State = {}
    for name, value in flat.items():
        _torch_private.set_element(state, mappings.get(name, (name,)), value)
    _fill_gaps(state, mappings)
    _restore_known(state)
    return state


def _fill_gaps(state: State, mappings: Mapping[str, tuple[str | int, ...]]) -> None:
    """Put an empty dict in each gap of a list: DCP saves all other items of a list with dicts."""
    held: dict[tuple[str | int, ...], set[int]] = {}
    for steps in mappings.values():
        for at, step in enumerate(steps):
            if type(step) is int:
                held.setdefault(steps[:at], set()).add(step)
    for steps, numbers in held.items():
        if len(numbers) <= max(numbers):
            found: Any = state
            for step in steps:
                found = found[step]
            for gap in {*range(max(numbers))} - numbers:
                found[gap] = {}


def _restore_known(state: Any) -> None:
    """Restore the parts of torch's optimizer and scheduler states that DCP loses.

    DCP stores the numbers of an optimizer's parameters and a MultiStepLR's milestones as text:
    ``load_state_dict`` would ignore the state, and no longer lower the rate. DCP also drops an
    empty ``state``, without which ``load_state_dict`` fails.
    """
    for part in _cycles.reached(state, _inside):
        if not isinstance(part, dict):
            continue
        _number_optimizer(part)
        milestones = part.get("milestones")
        if isinstance(milestones, dict) and {"gamma", "last_epoch"} <= part.keys():
            counted = {number_of(key): n for key, n in milestones.items()}
            if None not in counted and all(type(n) is int for n in counted.values()):
                part["milestones"] = collections.Counter(counted)


def _inside(part: Any) -> list[Any]:
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [one for one in inside if isinstance(one, dict | list)]


def _number_optimizer(state: State) -> None:
    groups, held = state.get("param_groups"), state.get("state", {})
    if not isinstance(groups, list) or not isinstance(held, dict):
        return
    lists = [one.get("params") for one in groups if isinstance(one, dict)]
    if "state" not in state and lists and all(isinstance(one, list) for one in lists):
        rest = dict(state)
        state.clear()
        state.update(state={}, **rest)
    numbers = {n for one in lists if isinstance(one, list) for n in one if type(n) is int}
    numbered = {number_of(key): one for key, one in held.items()}
    if numbers and numbered.keys() <= numbers:
        state["state"] = numbered


def _check_lists(path: str, mappings: Mapping[str, tuple[str | int, ...]]) -> None:
    """Refuse lists that are mostly gaps: DCP would allocate each list up to its last index.

    Raises:
        FormatError: the values' paths form such a list, or are not paths.
    """
    ends: dict[tuple[str | int, ...], int] = {}
    leaves = 0
    for name, steps in mappings.items():
        if not isinstance(steps, tuple) or len(steps) > DEPTH_MAX:
            raise FormatError(f"{path}/.metadata: the path of {name!r} is not one", path=path)
        leaves += 1
        for at, step in enumerate(steps):
            if type(step) is int:
                ends[steps[:at]] = max(ends.get(steps[:at], 0), step + 1)
    if sum(ends.values()) > _GAPS_MAX + leaves * DEPTH_MAX:
        longest = max(ends, key=lambda prefix: ends[prefix])
        where = ".".join(map(str, longest))
        raise FormatError(
            f"{path}/.metadata: the list {where!r} would have {ends[longest]} elements, and the "
            f"checkpoint has {leaves} values",
            path=path,
        )


def metadata_at(path: str, *, allow_pickle: bool) -> Any:
    """Return the metadata of a checkpoint.

    Raises:
        UnsupportedError: the pickle asks for classes that metadata never needs.
            CorruptCheckpointError: the pickle is damaged. FormatError: the metadata is not DCP's.
    """
    file = os.path.join(path, _METADATA)
    with _files.reading(file) as stream:
        data = stream.read()
    try:
        if allow_pickle:
            found = pickle.loads(data)
        else:
            refuse_collisions(data)
            found = _MetadataUnpickler(io.BytesIO(data)).load()
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from None
    except Exception as error:  # a damaged pickle raises anything
        refuse_pointer(file)
        raise unreadable(file, "the metadata", error) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise FormatError(f"{file} is not metadata of torch.distributed.checkpoint", path=file)
    for place in found.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
            raise FormatError(
                f"{file} refers to {name!r}, which is not a file in its directory", path=file
            )
    _check_files(path, {place.relative_path for place in found.storage_data.values()})
    return found


def _check_files(path: str, names: set[str]) -> None:
    """Refuse a checkpoint that lacks files, or whose paths are not files.

    Raises:
        MissingFilesError: files are missing, or are Git LFS pointers. FormatError: a path is not a
            file.
    """
    files = {name: os.path.join(path, name) for name in sorted(names)}
    missing = [name for name, file in files.items() if not os.path.exists(file)]
    if missing:
        raise MissingFilesError(
            f"{path} lacks {len(missing)} of the files that its .metadata lists: "
            f"{', '.join(missing[:20])}; {REMEDY}",
            path=path,
        )
    for file in files.values():
        if not os.path.isfile(file):
            raise FormatError(f"{file} is not a regular file", path=file)
        refuse_pointer(file)


class _Reader:
    def __init__(self, path: str, allow_pickle: bool) -> None:
        self._path = path
        self._allow_pickle = allow_pickle
        self.metadata = metadata_at(path, allow_pickle=allow_pickle)
        self._files = filesystem.FileSystemReader(path)
        self._files.set_up_storage_reader(self.metadata, True)

    def value(self, name: str, entry: Any) -> Any:
        if isinstance(entry, metadata.BytesStorageMetadata):
            return self._object(name)
        spec = spec_of(entry.properties.dtype, entry.size, name)
        return LazyTensor(*spec, functools.partial(self._tensor, name, entry))

    def _tensor(self, name: str, entry: Any) -> torch.Tensor:
        with reading(os.path.join(self._path, ".metadata"), f"the metadata of {name!r}"):
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if tensor.numel() == 0:
                return tensor
            whole = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
            items = _torch_private.read_items(name, entry, [whole])
            covered = sum(torch.Size(item.lengths).numel() for item in items)
        if covered != tensor.numel():
            raise FormatError(
                f"{self._path}/.metadata: the chunks of {name!r} hold {covered} elements of "
                f"{tensor.numel()}",
                path=self._path,
            )
        self._read(name, items, _Into(tensor))
        return tensor

    def _object(self, name: str) -> Any:
        into = _Into(None)
        index, nothing = metadata.MetadataIndex(name), torch.Size([0])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._read(name, [item], into)
        with reading(self._path, f"the value {name!r}"):
            return unpickled(into.blob, allow_pickle=self._allow_pickle)

    def _read(self, name: str, items: list[Any], into: _Into) -> None:
        with reading(self._path, repr(name)):
            self._files.read_data(LoadPlan(items), into)


class _Into(DefaultLoadPlanner):
    """Receives the bytes of one tensor, or of one value."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        super().__init__()
        self._tensor = tensor
        self.blob = io.BytesIO()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.blob = value

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        tensor = self._tensor
        assert tensor is not None
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass
