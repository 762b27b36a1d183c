"""States whose tensors the native reader loads on demand.

A verified read covers complete checksum chunks: reading small tensors one by one would read the
same chunk for each. So a small tensor is read together with the next tensors in the file.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

from ringstow import _native
from ringstow._foreign._nested_states import State
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _build
from ringstow._state.tree._walk import STORED, Leaf, Path

# Bytes to read at once, and to hold for later calls. Larger tensors are read alone.
_WINDOW_BYTES = 4 << 20
_HELD_BYTES_MAX = 4 * _WINDOW_BYTES


def lazy_model(path: str, config: str) -> State:
    """Return the tensors of safetensors files by name: of a file, an index, or a model's directory.

    Args:
        path: the file, index or directory.
        config: the configuration of reads, as JSON.

    Raises:
        CorruptCheckpointError, FormatError: a file is damaged, or not what its name says.
        MissingFilesError: files or parts of tensors are missing; names them.
        OSError: the system refused.
    """
    checkpoint = _native.Checkpoint(path, config, foreign=True)
    skeleton = {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}
    return lazy_state(path, checkpoint, skeleton, allow_pickle=False)


class Source(Protocol):
    """A checkpoint whose tensors load on demand."""

    @property
    def tensors(self) -> list[_build.Row]:
        """The rows of the tensors, in the order in which neighbours are read together."""

    def tensor(self, name: str) -> _build.Row | None:
        """Return the row of a tensor; None if there is none."""

    def load(self, names: list[str]) -> tuple[list[Any], str]:
        """Return the bytes of tensors, in the order of their names, and a report."""


def lazy_state(path: str, checkpoint: Source, skeleton: State, *, allow_pickle: bool) -> State:
    """Return the state of a skeleton, whose tensors and arrays load on demand."""
    # Tensors that are made of others stay parts, which load on demand.
    contents = _build.Contents(path, checkpoint.tensor, allow_pickle=allow_pickle, as_parts=True)
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
        origin = (checkpoint, leaf.body)
        lazy = LazyTensor(*stored, functools.partial(value, leaf, at), leaf.dtype, origin)
        return known.setdefault((leaf.body, leaf.dtype), lazy)

    return _build.Builder(contents, {}).value(skeleton, (), make)  # type: ignore[no-any-return]


class ReadAhead:
    """The tensors of a checkpoint. Several threads may use it at once."""

    def __init__(self, checkpoint: Source) -> None:
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
            while sum(self._nbytes[self._number[held]] for held in self._held) > _HELD_BYTES_MAX:
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
