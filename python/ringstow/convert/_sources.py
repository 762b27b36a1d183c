"""Opens the source of a conversion as a nested state whose tensors load on demand.

A verified read covers complete checksum chunks: reading small tensors one by one would read the
same chunk for each. So a small tensor is read together with those behind it in the file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
import zipfile
from typing import Any

from ringstow import _native
from ringstow._config import Config
from ringstow._errors import CorruptCheckpointError, InvalidStateError
from ringstow.convert._files import REMEDY, plain_numpy, reading
from ringstow.convert._walk import State
from ringstow.tensors._memory import LazyTensor
from ringstow.tree import _build, _skeleton
from ringstow.tree._walk import STORED, Leaf, Path

# How files by torch.save begin: as a zip archive; before torch 1.6 with a pickled number.
_ZIP = b"PK\x03\x04"
_OLD = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_HEAD_BYTES = 512

# In bytes: read at once, and held for later calls. Larger tensors are read alone.
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

        Its pool is another than the save's, whose buffers could all be held by fillers that wait
        for these reads.
        """
        pool_bytes = max(8 * self.config.block_bytes, 32 << 20)
        if pool_bytes == self.config.pool_bytes:
            pool_bytes += self.config.block_bytes
        return dataclasses.replace(self.config, pool_bytes=pool_bytes)


def open_source(path: str, kind: str, options: Options) -> State:
    """Return the state of a checkpoint of this kind, with tensors that load on demand.

    Raises:
        UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
        IncompleteCheckpointError: it is one rank's part, and lacks elements of a tensor.
        CorruptCheckpointError: the file is damaged.
        OSError: the system refused.
    """
    openers = {"ringstow": _ringstow, "dcp": _dcp, "torch": _torch_file, "hf": _hf}
    return openers[kind](path, options)


def _ringstow(path: str, options: Options) -> State:
    checkpoint = _native.Checkpoint(path, options.reading.to_json(), verify=options.verify)
    checkpoint.check_whole([name for name, *_ in checkpoint.tensors])
    return _lazy(path, checkpoint, _skeleton.parse(checkpoint.state, path), options)


def _hf(path: str, options: Options) -> State:
    knobs = options.reading.to_json()
    checkpoint = _native.Checkpoint(path, knobs, foreign=True, verify=options.verify)
    skeleton = {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}
    return _lazy(path, checkpoint, skeleton, options)


def _lazy(path: str, checkpoint: _native.Checkpoint, skeleton: State, options: Options) -> State:
    """Return the state of a skeleton, whose tensors and arrays load on demand."""
    contents = _build.Contents(path, checkpoint.tensors, allow_pickle=options.allow_pickle)
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
        # In the order of a shard: see `natural_alignment` in src/format/header.rs.
        tensors = sorted(checkpoint.tensors, key=lambda tensor: -_alignment(tensor[3]))
        self._names = [name for name, *_ in tensors]
        self._nbytes = [nbytes for *_, nbytes in tensors]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._held: dict[str, Any] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> Any:
        """Return a tensor's bytes, in memory that only the caller has.

        Raises:
            CorruptCheckpointError: the bytes are not those that were written.
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
        """Return a name and those of the small tensors behind it that are not held yet."""
        names, room = [self._names[number]], _WINDOW_BYTES - self._nbytes[number]
        for behind in range(number + 1, len(self._names)):
            room -= self._nbytes[behind]
            if room < 0 or self._names[behind] in self._held:
                break
            names.append(self._names[behind])
        return names


def _alignment(nbytes: int) -> int:
    return min(nbytes & -nbytes, 4096) if nbytes else 4096


def _dcp(path: str, options: Options) -> State:
    from ringstow.convert import _dcp

    return _dcp.read(path, allow_pickle=options.allow_pickle)


def _torch_file(path: str, options: Options) -> State:
    import torch

    mapped = _check_beginning(path)
    if not mapped:
        warnings.warn(
            f"{path} is in the format of torch before 1.6: it can't be mapped, and is loaded into "
            "memory at once",
            stacklevel=2,
        )
    elif options.verify:
        _check_zip(path)
    with reading(path, "it"), plain_numpy():
        return torch.load(  # type: ignore[no-any-return]
            path, map_location="cpu", mmap=mapped, weights_only=not options.allow_pickle
        )


def _check_beginning(path: str) -> bool:
    """Tell whether torch.save wrote a file as a zip archive, not in its older format.

    Raises:
        CorruptCheckpointError: the file is empty, zeroed or truncated.
        InvalidStateError: torch.save never writes such a beginning.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
    if not head:
        raise _damaged(path, "is empty")
    if not head.strip(b"\0"):
        raise _damaged(path, f"begins with {len(head)} zeros, as a file whose writer was cut off")
    if head.startswith(_ZIP):
        with reading(path, "it"):
            if zipfile.is_zipfile(path):
                return True
        what = f"is cut short: of a file by torch.save its {size} bytes are the beginning only"
        raise _damaged(path, f"{what}, without the list of what is in it")
    if any(begin.startswith(head) for begin in (_ZIP, b"\x80\x02" + _OLD[0])):
        raise _damaged(path, f"is cut short, to {size} bytes")
    # The number comes after the pickle's protocol and frame.
    if not (any(begin in head[:32] for begin in _OLD) or head[257:262] == b"ustar"):
        raise InvalidStateError(
            f"{path} was not written by torch.save, or its beginning is overwritten: it begins "
            f"with {head[:8]!r}, and neither as a zip archive does nor as torch's older format. "
            "Give a file by torch.save, or the directory of a checkpoint of another kind"
        )
    return False


def _damaged(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} {what}; {REMEDY}", file=path)


def _check_zip(path: str) -> None:
    """Verify the checksums that torch.save wrote; torch does not for a mapped file."""
    with reading(path, "it"), zipfile.ZipFile(path) as file:
        bad = file.testzip()
    if bad is not None:
        raise CorruptCheckpointError(
            f"{path}: the checksum of {bad} is not that which torch.save recorded; take another "
            "copy, or pass verify=False (--no-verify) if it was written without checksums",
            file=path,
        )
