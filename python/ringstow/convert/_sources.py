"""Opens the source of a conversion as a nested state whose tensors are loaded one at a time."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
import zipfile
from typing import Any

from ringstow import _native
from ringstow._config import Config
from ringstow._errors import CorruptCheckpointError, InvalidStateError
from ringstow.convert._ahead import ReadAhead
from ringstow.convert._files import REMEDY, plain_numpy, reading
from ringstow.convert._walk import State
from ringstow.tensors._memory import LazyTensor
from ringstow.tree import _build, _skeleton
from ringstow.tree._walk import STORED, Leaf, Path, rebuild

# How files by torch.save begin: as a zip archive; before torch 1.6 with a pickled number.
_ZIP = b"PK\x03\x04"
_OLD = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_HEAD_BYTES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of opening a source."""

    allow_pickle: bool = False
    verify: bool = True
    config: Config = dataclasses.field(default_factory=Config)

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
    checkpoint = _native.Checkpoint(path, options.reading.to_json())
    checkpoint.check_whole([name for name, *_ in checkpoint.tensors])
    contents = _build.Contents(path, checkpoint.tensors)
    skeleton = _skeleton.parse(checkpoint.state, path)
    _build.Survey(contents, allow_pickle=options.allow_pickle).add(skeleton)
    ahead = ReadAhead(checkpoint, verify=options.verify, config=options.reading.to_json())
    known: dict[str, LazyTensor] = {}

    def value(leaf: Leaf, at: Path) -> Any:
        blocks: dict[str, Any] = {}
        if leaf.tag in STORED:
            blocks[leaf.body] = ahead.take(leaf.body)
        return _build.Builder(contents, blocks, allow_pickle=options.allow_pickle).value(leaf, at)

    def make(leaf: Leaf, at: Path) -> Any:
        if leaf.tag not in ("$tensor", "$ndarray"):
            return value(leaf, at)
        stored = contents.stored(leaf, at)
        lazy = LazyTensor(*stored, functools.partial(value, leaf, at), leaf.dtype)
        return known.setdefault(leaf.body + leaf.dtype, lazy)

    return rebuild(skeleton, (), make)  # type: ignore[no-any-return]


def _dcp(path: str, options: Options) -> State:
    from ringstow.convert import _dcp

    return _dcp.read(path, allow_pickle=options.allow_pickle)


def _hf(path: str, options: Options) -> State:
    checkpoint = _native.Checkpoint(path, options.reading.to_json(), foreign=True)
    contents = _build.Contents(path, checkpoint.tensors)
    ahead = ReadAhead(checkpoint, verify=options.verify, config=options.reading.to_json())

    def load(name: str) -> Any:
        blocks = {name: ahead.take(name)}
        return _build.Builder(contents, blocks).value(Leaf("$tensor", name), (name,))

    def lazy(name: str) -> LazyTensor:
        stored = contents.stored(Leaf("$tensor", name), (name,))
        return LazyTensor(*stored, functools.partial(load, name))

    return {name: lazy(name) for name, *_ in checkpoint.tensors}


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
