"""Reads and writes checkpoints of torch.distributed.checkpoint's own format, a tensor at a time.

``.metadata`` is a pickle. A restricted unpickler reads it and makes only the classes of metadata.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringstow import _native, _replace
from ringstow._errors import FormatError, InvalidStateError, UnsupportedError
from ringstow._kinds import DCP_DATA, taken
from ringstow.convert import _files
from ringstow.convert._files import plain_numpy, reading, unreadable
from ringstow.convert._walk import State, is_tensor, loaded, replaced, spec_of
from ringstow.dcp import _private
from ringstow.tensors import _torch
from ringstow.tensors._memory import LazyTensor
from ringstow.tree._skeleton import DEPTH_MAX

_METADATA = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
# The classes of metadata, besides dtypes. Two have the names of torch 2.0.
_KNOWN = {
    *(f"{_PACKAGE}.metadata.{name}" for name in metadata.__all__),
    f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING",
    f"{_PACKAGE}.filesystem._StorageInfo",
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
    """Makes only the classes of metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" in _KNOWN:
            return super().find_class(module, name)
        raise UnsupportedError(
            f"it asks for {module}.{name}, which metadata never needs, so it is not unpickled: if "
            "you trust who wrote it, pass allow_pickle=True (--allow-pickle); it can run any code"
        )


def read(path: str, *, allow_pickle: bool) -> State:
    """Return the nested state of a checkpoint, with lazy tensors and all other values loaded.

    Raises:
        UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
        CorruptCheckpointError: a file is damaged.
        FormatError: the metadata is not what DCP writes.
    """
    state: State = {}
    # Its objects may lack any attribute, and have values of any type: nothing checks a pickle.
    with reading(os.path.join(path, ".metadata"), "the metadata"):
        reader = _Reader(path, allow_pickle)
        mappings = reader.metadata.planner_data or {}
        _check_lists(path, mappings)
        for name, entry in reader.metadata.state_dict_metadata.items():
            _private.set_element(state, mappings.get(name, (name,)), reader.value(name, entry))
    return state


def _check_lists(path: str, mappings: Mapping[str, tuple[str | int, ...]]) -> None:
    """Refuse lists that are mostly gaps: DCP fills each up to its last index before it has a value.

    Raises:
        FormatError: the paths of the values lead to such a list, or are no paths.
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


class _Reader:
    def __init__(self, path: str, allow_pickle: bool) -> None:
        self._path = path
        self._allow_pickle = allow_pickle
        self.metadata = self._metadata()
        self._files = filesystem.FileSystemReader(path)
        self._files.set_up_storage_reader(self.metadata, True)

    def value(self, name: str, entry: Any) -> Any:
        if isinstance(entry, metadata.BytesStorageMetadata):
            return self._object(name)
        spec = spec_of(entry.properties.dtype, entry.size, name)
        return LazyTensor(*spec, functools.partial(self._tensor, name, entry))

    def _metadata(self) -> Any:
        file = os.path.join(self._path, _METADATA)
        with open(file, "rb") as stream:
            unpickler = pickle.Unpickler if self._allow_pickle else _MetadataUnpickler
            try:
                found = unpickler(stream).load()
            except UnsupportedError as error:
                raise UnsupportedError(f"{file}: {error}") from None
            except Exception as error:  # a damaged pickle raises anything
                raise unreadable(file, "the metadata", error) from error
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise FormatError(f"{file} is not metadata of torch.distributed.checkpoint", path=file)
        for place in found.storage_data.values():
            name = getattr(place, "relative_path", None)
            if (
                not isinstance(name, str)
                or name in ("", ".", "..")
                or os.path.basename(name) != name
            ):
                raise FormatError(
                    f"{file} refers to {name!r}, which is not a file in its directory", path=file
                )
        return found

    def _tensor(self, name: str, entry: Any) -> torch.Tensor:
        with reading(os.path.join(self._path, ".metadata"), f"the metadata of {name!r}"):
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if tensor.numel() == 0:
                return tensor
            whole = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
            items = _private.read_items(name, entry, [whole])
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
        with reading(self._path, f"the value {name!r}"), plain_numpy():
            return torch.load(into.blob, map_location="cpu", weights_only=not self._allow_pickle)

    def _read(self, name: str, items: list[Any], into: _Into) -> None:
        with reading(self._path, repr(name)):
            self._files.read_data(LoadPlan(items), into)


class _Into(DefaultLoadPlanner):
    """Receives what is read of one tensor, or of one value."""

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


def as_stored(state: State) -> State:
    """Return a state as DCP loads it: keys are text, an OrderedDict is a dict, no dict is empty.

    Raises:
        InvalidStateError: two leaves have the same dotted name.
    """
    try:
        flat, mappings = _private.flattened(replaced(state, _shadow))
    except ValueError as error:
        raise InvalidStateError(
            f"torch.distributed.checkpoint joins keys by dots, and then two are the same: {error}"
        ) from None
    nested: State = {}
    for name, value in flat.items():
        _private.set_element(nested, mappings[name], replaced(value, _of_shadow))
    return nested


def write(state: State, path: str, wrote: Callable[[int], None]) -> None:
    """Write a state as torch's own writer does, a tensor at a time.

    Args:
        state: its tensors may be lazy.
        path: a directory without such a checkpoint.
        wrote: called with the number of bytes of each tensor that was written.

    Raises:
        FileExistsError: another process writes a checkpoint there; its files stay.
        OSError: the system refused; the written files are removed.
    """
    writer = _Writer(path, wrote)
    try:
        shadows = replaced(state, _shadow)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(shadows, storage_writer=writer, planner=_Planner(), no_dist=True)
        _native.sync_dir(path)
    except BaseException as error:
        _replace.remove_dcp(path, writer.created)
        raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    """Return the failure itself from torch's exception, which lists failures by rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return next(iter(failures.values()))[0]  # type: ignore[no-any-return]
    return error


def _shadow(value: Any, path: Any) -> Any:
    """Return a tensor without data, for torch's planner, which finds tensors by type."""
    if not is_tensor(value):
        return value
    if type(value) is LazyTensor:
        pair = value.dtype == "F4"  # torch counts pairs
        shape = (*value.shape[:-1], value.shape[-1] // 2) if pair else value.shape
        shadow: Any = torch.empty(shape, dtype=_torch.dtype_of(value.dtype, ""), device="meta")
    else:
        shadow = torch.empty(value.shape, dtype=value.dtype, device="meta")
    shadow.source = value
    return shadow


def _of_shadow(value: Any, path: Any) -> Any:
    return getattr(value, "source", value)


class _Planner(DefaultSavePlanner):
    """Plans with shadows, and loads the tensor of each when it is written."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return replaced(found, lambda value, path: loaded(_of_shadow(value, path)))


class _Writer(filesystem.FileSystemWriter):
    """torch's writer, except that it drops each tensor when written; torch's keeps them all."""

    def __init__(self, path: str, wrote: Callable[[int], None]) -> None:
        super().__init__(path, overwrite=False)
        self._wrote = wrote
        self.created: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        path = os.path.join(self.path, DCP_DATA)
        with _files.naming(path), open(path, "xb") as stream:
            self.created.append(DCP_DATA)
            for item in plan.items:
                begin = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    self._wrote(_append(data, stream))
                length = stream.tell() - begin
                place = _private.storage_info(DCP_DATA, begin, length)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                )
            stream.flush()
            os.fsync(stream.fileno())
        # The metadata must not be durable before the name of this file is.
        _native.sync_dir(str(self.path))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._refuse_other()
        return super().prepare_local_plan(plan)

    def _refuse_other(self) -> None:
        mark = os.path.join(self.path, _METADATA)
        if os.path.lexists(mark):
            raise taken(mark, "is there already")

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        self._refuse_other()
        self.created += [f"{_METADATA}.tmp", _METADATA]
        super().finish(metadata, results)


def _append(tensor: Any, stream: IO[bytes]) -> int:
    """Write a tensor without the rest of a storage that it views; return its number of bytes."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    _files.save(tensor, stream)
    return int(tensor.nbytes)
