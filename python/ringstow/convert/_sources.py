"""Opens the source of a conversion as a nested state whose tensors load on demand.

A verified read covers complete checksum chunks: reading small tensors one by one would read the
same chunk for each. So a small tensor is read together with the next tensors in the file.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

from ringstow import _foreign, _native
from ringstow._core._config import Config
from ringstow._foreign import _torch_file as _torch_files
from ringstow._foreign._nested_states import State
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _build, _skeleton
from ringstow._state.tree._walk import STORED, Leaf, Path

# Bytes to read at once, and to hold for later calls. Larger tensors are read alone.
_WINDOW_BYTES = 4 << 20
_HELD_BYTES_MAX = 4 * _WINDOW_BYTES


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
        UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
        IncompleteCheckpointError: the source is one rank's part, and lacks elements of a tensor.
        CorruptCheckpointError: the file is damaged.
        OSError: the system refused.
    """
    openers = {"ringstow": _ringstow, "torch": _torch_file, "hf": _hf}
    if kind in openers:
        return openers[kind](path, options)
    return _foreign.state_of(path, kind, allow_pickle=options.allow_pickle, verify=options.verify)


def _ringstow(path: str, options: Options) -> State:
    checkpoint = _native.Checkpoint(path, options.reading.to_json(), verify=options.verify)
    checkpoint.check_whole([name for name, *_ in checkpoint.tensors])
    return _lazy(path, checkpoint, _skeleton.parse(checkpoint.state, path), options)


def _hf(path: str, options: Options) -> State:
    if not _foreign.is_for_native(path):
        return _foreign.state_of(path, "hf", allow_pickle=options.allow_pickle, verify=True)
    knobs = options.reading.to_json()
    checkpoint = _native.Checkpoint(path, knobs, foreign=True, verify=options.verify)
    skeleton = {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}
    return _lazy(path, checkpoint, skeleton, options)


def _lazy(path: str, checkpoint: _native.Checkpoint, skeleton: State, options: Options) -> State:
    """Return the state of a skeleton, whose tensors and arrays load on demand."""
    contents = _build.Contents(path, checkpoint.tensor, allow_pickle=options.allow_pickle)
    _build.Survey(contents).add(skeleton)
    ahead = ReadAhead(checkpoint)
    known: dict[tuple[str, str], LazyTensor] = {}

    def value(leaf: Leaf, at: Path) -> Any:
        blocks: dict[str, Any] = {}
        if leaf.tag in STORED:
            blocks[leaf.body] = ahead.take(leaf.body)
        return _build.Builder(contents, blocks).make(leaf, at)

    def make(leaf: Leaf, at: Path) -> Any:
        if leaf.tag not in ("$tensor", "$ndarray"):
            return value(leaf, at)
        stored = contents.stored(leaf, at)
        lazy = LazyTensor(*stored, functools.partial(value, leaf, at), leaf.dtype)
        return known.setdefault((leaf.body, leaf.dtype), lazy)

    return _build.Builder(contents, {}).value(skeleton, (), make)  # type: ignore[no-any-return]


class ReadAhead:
    """The tensors of a checkpoint. Several threads may use it at once."""

    def __init__(self, checkpoint: _native.Checkpoint) -> None:
        self._checkpoint = checkpoint
        # The order of tensors in a shard: see `natural_alignment` in src/format/header.rs.
        tensors = sorted(checkpoint.tensors, key=lambda tensor: -_alignment(tensor[3]))
        self._names = [name for name, *_ in tensors]
        self._nbytes = [nbytes for *_, nbytes in tensors]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._held: dict[str, Any] = {}
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too

    def take(self, name: str) -> Any:
        """Return a tensor's bytes, in memory that only the caller uses.

        Raises:
            CorruptCheckpointError: the bytes are damaged.
        """
        with self._lock:
            block = self._held.pop(name, None)
            if block is not None:
                return block
            names = self._window(self._number[name])
            block, *others = self._checkpoint.load(names)[0]
            self._held.update(zip(names[1:], others, strict=True))
            while sum(other.nbytes for other in self._held.values()) > _HELD_BYTES_MAX:
                del self._held[next(iter(self._held))]
            return block

    def _window(self, number: int) -> list[str]:
        """Return a name and the names of the next small tensors that are not held yet."""
        names, room = [self._names[number]], _WINDOW_BYTES - self._nbytes[number]
        for behind in range(number + 1, len(self._names)):
            room -= self._nbytes[behind]
            if room < 0 or self._names[behind] in self._held:
                break
            names.append(self._names[behind])
        return names


def _alignment(nbytes: int) -> int:
    return min(nbytes & -nbytes, 4096) if nbytes else 4096


def _torch_file(path: str, options: Options) -> State:
    if options.verify and _torch_files.is_zip(path):
        _torch_files.check_zip(path)
    files = _torch_files.Files(allow_pickle=options.allow_pickle, verify=False)
    return files.read(path)  # type: ignore[no-any-return]
