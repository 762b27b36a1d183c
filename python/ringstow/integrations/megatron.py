"""Megatron-Core's distributed checkpoints by ringstow: `save` for ``dist_checkpointing.save``.

Needs the package ``megatron-core``. See docs/trainers/large-scale.md for benefits and limits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies import torch as stock
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from ringstow._core._config import Config
from ringstow._core._errors import UnsupportedError
from ringstow._ranks._group import team_of
from ringstow._saving._guard import Staging, check_staging
from ringstow._saving._save_future import SaveHandle
from ringstow.dcp import SavePlanner, StorageReader, StorageWriter
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._kit._ranks import Ranks
from ringstow.integrations._kit._refusals import refuse_places
from ringstow.integrations._megatron import _seam as _seam  # checks when it is imported

__all__ = ["RingstowLoadStrategy", "RingstowSaveStrategy", "save"]

_BACKEND, _VERSION = "ringstow", 1
# The names in a checkpoint's directory that a save replaces; all others stay.
_OWN = re.compile(
    r"common\.pt|(metadata|manifest)\.json.*|\.metadata|.*\.(distcp|safetensors)|\..*"
)


@dataclasses.dataclass
class _Objects:
    """The value of a ShardedObject's key: DCP would flatten a list with tensors."""

    values: list[Any]


class RingstowSaveStrategy(base.AsyncSaveShardedStrategy):
    """Saves shards by ringstow, for `save` of this module.

    Keep one for the whole training run: it reuses its memory.

    Args:
        config: ringstow's settings; None means the defaults.
        staging: how a background save keeps the values of the call: ``"guard"``, ``"snapshot"`` or
            ``"wait"``; see `ringstow.save_async`.
        allow_pickle: pickle values of ShardedObjects that ringstow cannot save by itself. Loading
            them needs `RingstowLoadStrategy(allow_pickle=True)`, and can run any code.

    Raises:
        InvalidStateError: the settings stripe checkpoints, or ``staging`` is not for several ranks.
    """

    def __init__(
        self,
        *,
        config: Config | None = None,
        staging: Staging = "guard",
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(_BACKEND, _VERSION)
        check_staging(staging, is_for_ranks=True)
        refuse_places(config)
        self._options = config, staging, allow_pickle
        self._ranks: Ranks | None = None
        self._handle: SaveHandle | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Return True: shards and objects are one commit."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save the shards of all ranks, and return once they are durable.

        Raises:
            Exception: this rank's failure, or an error that names another rank's; for shards that
                form no regular grid, torch's CheckpointException.
            UnsupportedError: the caller is not `save` of this module.
        """
        ranks = self._begin(checkpoint_dir)
        state, is_regular = _state(sharded_state_dict)
        if is_regular:
            ranks.save(state, str(checkpoint_dir), None)
        else:
            self._save_by_dcp(ranks, state, str(checkpoint_dir))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Start to save the shards of all ranks; the next optimizer step waits for the copies.

        Shards that form no regular grid are saved before this returns.

        Returns:
            A request whose process only waits, and whose finalization raises the save's failure on
            all ranks.
        """
        ranks = self._begin(checkpoint_dir)
        state, is_regular = _state(sharded_state_dict)
        if not is_regular:
            self._save_by_dcp(ranks, state, str(checkpoint_dir))
            return AsyncRequest(None, (), [])
        self._handle = handle = ranks.save_async(state, str(checkpoint_dir), None)
        descriptor, mark = tempfile.mkstemp(prefix="ringstow-")
        os.close(descriptor)

        def note(_: object) -> None:
            with contextlib.suppress(OSError):
                os.unlink(mark)  # the waiting process notices it

        def finalize() -> None:
            handle.result()

        handle.add_done_callback(note)
        return AsyncRequest(_wait_for, (mark, os.getpid()), [finalize])

    def _save_by_dcp(self, ranks: Ranks, state: dict[str, Any], path: str) -> None:
        """Save shards that form no regular grid, which Megatron describes only to DCP."""
        config, _, allow_pickle = self._options
        writer = StorageWriter(config=config, allow_pickle=allow_pickle)
        try:
            save_by_dcp(
                state,
                checkpoint_id=path,
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=ranks.group,
            )
        finally:
            writer.close()

    def _begin(self, checkpoint_dir: Any) -> Ranks:
        """Wait for the previous save; its request raises its failure."""
        if not _rename_when_complete.is_hidden(os.path.basename(str(checkpoint_dir))):
            raise UnsupportedError(
                "RingstowSaveStrategy needs ringstow.integrations.megatron.save in place of "
                "dist_checkpointing.save: it completes a checkpoint by one rename"
            )
        if self._ranks is None:
            self._ranks = Ranks(*self._options)
        handle, self._handle = self._handle, None
        if handle is not None:
            concurrent.futures.wait([handle])
        return self._ranks


class RingstowLoadStrategy(stock.TorchDistLoadShardedStrategy):
    """Loads the shards of ringstow's checkpoints; a default instance is already registered.

    Args:
        allow_pickle: unpickle ShardedObjects that only a pickle could save, which can run any code.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Load the shards that a state dict names, on any number of ranks.

        Raises:
            CheckpointException: a rank failed, for example by a wrong checksum; raised on all
                ranks.
        """
        wanted = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
        flat, mapping, renamed = stock._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        tensors, objects = _by_kind(flat)
        state = {
            **stock.mcore_to_pyt_state_dict(tensors, True),
            **{key: _Objects([]) for key in objects},
        }
        load_by_dcp(
            state,
            checkpoint_id=str(checkpoint_dir),
            storage_reader=self._reader(),
            planner=stock.MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[x for x in wanted if not x.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={
                    x.key: x for x in wanted if x.allow_shape_mismatch
                },
            ),
        )
        loaded = {
            key: one.values if key in objects else stock._unwrap_pyt_sharded_tensor(one)
            for key, one in state.items()
        }
        result = stock._replace_sharded_keys_with_state_dict_keys(loaded, mapping, renamed)
        stock._restore_dict_types(result, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        """Return the global shapes and dtypes of all tensors, by their keys."""
        metadata = metadata or self._reader(checkpoint_dir).read_metadata()
        tensors = {
            key: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for key, one in metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        return {
            key: ShardedTensor.from_rank_offsets(key, one).without_data()
            for key, one in tensors.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """Return the metadata of all tensors, and the keys of all objects."""
        metadata = self._reader(checkpoint_dir).read_metadata()
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, one in metadata.state_dict_metadata.items()
            if isinstance(one, BytesStorageMetadata)
        ]
        found = {one.unique_key: one for one in objects}
        return {**found, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Refuse: the files of a complete checkpoint do not change.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"remove_sharded_tensors cannot remove {key_prefix} from a "
            "checkpoint of ringstow's: save without these tensors"
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Refuse a checkpoint of another backend, which its own strategy loads.

        Raises:
            UnsupportedError: the checkpoint has another backend.
        """
        if loaded_backend != _BACKEND:
            raise UnsupportedError(
                f"RingstowLoadStrategy is not for a checkpoint of the backend {loaded_backend}: "
                "leave out sharded_strategy, so that Megatron takes the right one"
            )

    def _reader(self, path: Any = None) -> StorageReader:
        return StorageReader(None if path is None else str(path), allow_pickle=self._allow_pickle)


base.register_default_strategy(
    base.StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, RingstowLoadStrategy()
)
_default: list[RingstowSaveStrategy] = []


def save(
    sharded_state_dict: Any,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: base.SaveShardedStrategy | None = None,
    *,
    async_sharded_save: bool = False,
    **options: Any,
) -> AsyncRequest | None:
    """Save as ``dist_checkpointing.save`` does, by ringstow; call it on every rank.

    The directory appears, or is replaced as a whole, when it is complete and durable.

    Args:
        sharded_state_dict: the state dict of this rank, the same as for
            ``dist_checkpointing.save``.
        checkpoint_dir: the directory; its parent need not exist.
        sharded_strategy: a `RingstowSaveStrategy`, or Megatron's wrapper around one; None means
            one for all saves, with the defaults.
        async_sharded_save: return a request at once, for Megatron's ``AsyncCallsQueue``.
        options: other arguments of ``dist_checkpointing.save``.

    Returns:
        The request, or None for a save that is complete.

    Raises:
        UnsupportedError: another strategy, or Megatron's storage client for URLs.
        BaseException: a rank's failure, on all ranks; also raised by the request's finalization.
    """
    strategy = sharded_strategy or _shared()
    inner = getattr(strategy, "base_strategy", strategy)
    if not isinstance(inner, RingstowSaveStrategy) or MultiStorageClientFeature.is_enabled():
        raise UnsupportedError(
            "ringstow's save takes a RingstowSaveStrategy, or Megatron's wrapper around one, and "
            "a directory. Call dist_checkpointing.save for others"
        )
    final = os.path.abspath(checkpoint_dir)
    part = team_of().from_first(lambda: _rename_when_complete.begin(final))
    first: list[Callable[[], None]] = []

    def finalize() -> None:
        with _discarding(part, final):
            for function in first:
                function()
            _complete(part, final)
        _rename_when_complete.end(final)

    with _discarding(part, final):
        request: AsyncRequest | None = serialization.save(
            sharded_state_dict, part, strategy, async_sharded_save=async_sharded_save, **options
        )
    if request is None:
        finalize()
        return None
    first = request.finalize_fns
    return request._replace(finalize_fns=[finalize])


def _discarding(part: str, final: str) -> contextlib.AbstractContextManager[None]:
    return _rename_when_complete.discarding(part, final, removes=dist.get_rank() == 0)


def _complete(part: str, final: str) -> None:
    """Make all files durable and rename the directory, on rank 0; fail on all ranks."""

    def complete() -> None:
        _rename_when_complete.keep_others(final, part, lambda name: bool(_OWN.fullmatch(name)))
        _rename_when_complete.complete(part, final)

    team_of().from_first(complete)


def _shared() -> RingstowSaveStrategy:
    if not _default:
        _default.append(RingstowSaveStrategy())
    return _default[0]


def _by_kind(flat: dict[str, list[Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the objects of a flat state dict."""
    objects = {key: many for key, many in flat.items() if isinstance(many[0], ShardedObject)}
    return {key: many for key, many in flat.items() if key not in objects}, objects


def _state(sharded_state_dict: Any) -> tuple[dict[str, Any], bool]:
    """Return the state for DCP, and whether a background save can take it."""
    flat, _, _ = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
    tensors, objects = _by_kind(flat)
    every = [x for many in tensors.values() for x in many]
    if flattened := [x.key for x in every if x.flattened_range is not None]:
        raise UnsupportedError(f"{flattened[0]} has a flattened_range, which is not supported")
    is_regular = all(x.has_regular_grid for x in every)
    convert: Callable[[Any], Any] = stock.sharded_tensor_to_torch_sharded_tensor
    for one in every:
        one.data = one.data.detach()
    shards = (
        {key: convert(many) for key, many in tensors.items()}
        if is_regular
        else stock.mcore_to_pyt_state_dict(tensors, False)
    )
    return {**shards, **{k: _Objects([x.data for x in v]) for k, v in objects.items()}}, is_regular


def _wait_for(mark: str, trainer: int) -> None:
    """Wait until the trainer's save has ended, in the process that Megatron starts for it."""
    if os.getpid() == trainer:
        return  # the finalization waits instead
    while os.path.exists(mark) and os.getppid() == trainer:
        time.sleep(0.02)
