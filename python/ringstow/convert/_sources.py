"""Opens the source of a conversion as a nested state whose tensors load on demand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ringstow import _foreign, _native
from ringstow._core._config import Config
from ringstow._foreign import _torch_file as _torch_files
from ringstow._foreign._lazy_tensors import lazy_model, lazy_state
from ringstow._foreign._nested_states import State
from ringstow._foreign._torch_file import Files
from ringstow._reading._mapped_tensors import Mapped
from ringstow._reading._names import skeleton_of, tell_idle
from ringstow._state.tree import _skeleton
from ringstow._state.tree._fitting import renamed_tree
from ringstow._state.tree._rename import Rename


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion; see `ringstow.convert.convert`."""

    allow_pickle: bool
    verify: bool
    overwrite: bool
    config: Config
    prefix: str
    dtype: str | None
    max_shard_bytes: int
    dequantize: bool = False
    rename: Rename | None = None
    keeps_optimizers: bool = False
    """Whether ``rename`` leaves an optimizer's state as it is: the target will not have it."""

    @property
    def reading(self) -> Config:
        """The configuration of reads that a running save waits for.

        It has a pool of its own: buffers of the save's pool may all be held by threads that wait
        for these reads.
        """
        pool_bytes = max(8 * self.config.block_bytes, 32 << 20)
        if pool_bytes == self.config.staging_bytes:
            pool_bytes += self.config.block_bytes
        return dataclasses.replace(self.config, pool_bytes=pool_bytes)


def open_source(path: str, kind: str, options: Options) -> State:
    """Return the state of a checkpoint of this kind, with tensors that load on demand.

    Raises:
        KeyMismatchError: the rename does not fit the source's tensors.
        UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
        IncompleteCheckpointError: the source is one rank's part, and lacks elements of a tensor.
        CorruptCheckpointError: the file is damaged.
        OSError: the system refused.
    """
    if kind == "ringstow":
        return _ringstow(path, options)
    knobs = options.reading.to_json()
    if kind in ("hf", "safetensors") and not _native.has_weights_by_torch(path):
        if options.rename is None:
            return lazy_model(path, knobs)
        model = _native.Checkpoint(path, knobs, foreign=True)
        return _renamed(path, model, skeleton_of(model, path), options)
    verify = options.verify
    if kind == "torch" and verify and _torch_files.is_zip(path):
        _torch_files.check_zip(path)
        verify = False
    files = Files(allow_pickle=options.allow_pickle, verify=verify, config=knobs)
    if options.rename is None:
        return _foreign.state_of(path, kind, files)
    state = functools.partial(_foreign.state_of, path, kind, files)
    found = _foreign.Foreign(path, kind, {"": state}, files)
    return _renamed(path, found, found.tree, options)


def _renamed(path: str, checkpoint: Any, skeleton: State, options: Options) -> State:
    """Return the state of a skeleton with the names and tensors that the rename makes."""
    mapped = Mapped(checkpoint)
    assert options.rename is not None
    skeleton = renamed_tree(
        skeleton,
        options.rename,
        mapped.tensors_for(path),
        path,
        keeps_optimizers=options.keeps_optimizers,
    )
    tell_idle(options.rename, path)
    return lazy_state(path, mapped, skeleton, allow_pickle=options.allow_pickle)


def _ringstow(path: str, options: Options) -> State:
    checkpoint = _native.Checkpoint(path, options.reading.to_json(), verify=options.verify)
    checkpoint.check_whole([name for name, *_ in checkpoint.tensors])
    skeleton = _skeleton.parse(checkpoint.state, path)
    if options.rename is not None:
        return _renamed(path, checkpoint, skeleton, options)
    return lazy_state(path, checkpoint, skeleton, allow_pickle=options.allow_pickle)
