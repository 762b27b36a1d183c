"""Writes checkpoints of torch.distributed.checkpoint's own format, a tensor at a time."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import InvalidStateError
from ringstow._foreign import _pickles
from ringstow._foreign._dcp import nested
from ringstow._foreign._nested_states import State, is_tensor, loaded, replaced
from ringstow._publish import _replace
from ringstow._publish._checkpoint_kinds import DCP_DATA, taken
from ringstow._state import _torch_private
from ringstow._state.tensors import _torch
from ringstow._state.tensors._memory import LazyTensor
from ringstow.convert import _torch_files

_METADATA = ".metadata"


def as_stored(state: State) -> State:
    """Return a state as DCP loads it: keys are text, an OrderedDict is a dict.

    Raises:
        InvalidStateError: two leaves have the same dotted name.
    """
    try:
        flat, mappings = _torch_private.flattened(replaced(state, _shadow))
    except ValueError as error:
        raise InvalidStateError(
            f"torch.distributed.checkpoint joins keys by dots, which makes two keys equal: {error}"
        ) from None
    return nested({name: replaced(value, _of_shadow) for name, value in flat.items()}, mappings)


def write(state: State, path: str, wrote: Callable[[int], None]) -> None:
    """Write a state as torch's own writer does, a tensor at a time.

    Args:
        state: the state; its tensors may be lazy.
        path: a directory without such a checkpoint.
        wrote: called with the number of bytes of each tensor that was written.

    Raises:
        FileExistsError: another process writes a checkpoint there; its files stay.
        OSError: the system refused; the written files are removed.
    """
    writer = _Writer(path, wrote)
    try:
        shadows = replaced(state, _shadow)
        _torch_private.save_alone(shadows, writer, _Planner())
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
    """Plans with shadow tensors, and loads each tensor when it is written."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return replaced(found, lambda value, path: loaded(_of_shadow(value, path)))


class _Writer(filesystem.FileSystemWriter):
    """torch's writer, but dropping each tensor when it is written; torch's keeps all."""

    def __init__(self, path: str, wrote: Callable[[int], None]) -> None:
        super().__init__(path, overwrite=False)
        self._wrote = wrote
        self.created: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        path = os.path.join(self.path, DCP_DATA)
        with _pickles.naming(path), _files.new(path) as stream:
            self.created.append(DCP_DATA)
            for item in plan.items:
                begin = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    self._wrote(_append(data, stream))
                length = stream.tell() - begin
                place = _torch_private.storage_info(DCP_DATA, begin, length)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                )
            stream.flush()
            os.fsync(stream.fileno())
        # The metadata must not be durable before this file's name is.
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
    _torch_files.save(tensor, stream)
    return int(tensor.nbytes)
