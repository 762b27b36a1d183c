"""Opens what is to be converted: a nested state whose tensors are loaded one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import warnings
import zipfile
from typing import Any

from ringstow import _build, _native, _tree
from ringstow._config import Config
from ringstow._errors import CorruptCheckpointError, UnsupportedError
from ringstow._memory import LazyTensor
from ringstow._state import Path
from ringstow._tree import Leaf
from ringstow.convert._ahead import ReadAhead

State = dict[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What opening depends on."""

    allow_pickle: bool = False
    verify: bool = True
    config: Config = dataclasses.field(default_factory=Config)

    @property
    def reading(self) -> Config:
        """The configuration of reads that a running save waits for.

        Never the save's own: its pool could be all in the hands of those that wait.
        """
        pool_bytes = max(8 * self.config.block_bytes, 32 << 20)
        if pool_bytes == self.config.pool_bytes:
            pool_bytes += self.config.block_bytes
        return dataclasses.replace(self.config, pool_bytes=pool_bytes)


def open_source(path: str, kind: str, options: Options) -> State:
    """Return the state of a checkpoint of this kind, its tensors to be loaded on demand.

    Raises:
        UnsupportedError: a value that only pickle can make, without ``allow_pickle``.
        IncompleteCheckpointError: it is one rank's part of a whole, and has only some of a tensor.
        CorruptCheckpointError: the file is damaged.
        OSError: the system refused.
    """
    if kind == "dcp":
        from ringstow.convert import _dcp

        return _dcp.read(path, allow_pickle=options.allow_pickle)
    return {"ringstow": _ringstow, "torch": _torch_file, "hf": _hf}[kind](path, options)


def _ringstow(path: str, options: Options) -> State:
    checkpoint = _native.Checkpoint(path, options.reading.to_json())
    checkpoint.check_whole([name for name, *_ in checkpoint.tensors])
    contents = _build.Contents(path, checkpoint.tensors)
    skeleton = _tree.parse(checkpoint.state, path)
    _build.Survey(contents, allow_pickle=options.allow_pickle).add(skeleton)
    ahead = ReadAhead(checkpoint, verify=options.verify, config=options.reading.to_json())
    known: dict[str, LazyTensor] = {}

    def value(leaf: Leaf, at: Path) -> Any:
        blocks: dict[str, Any] = {}
        if leaf.tag in _tree.STORED:
            blocks[leaf.body] = ahead.take(leaf.body)
        return _build.Builder(contents, blocks, allow_pickle=options.allow_pickle).value(leaf, at)

    def make(leaf: Leaf, at: Path) -> Any:
        if leaf.tag not in ("$tensor", "$ndarray"):
            return value(leaf, at)
        stored = contents.stored(leaf, at)
        lazy = LazyTensor(*stored, functools.partial(value, leaf, at), leaf.dtype)
        return known.setdefault(leaf.body + leaf.dtype, lazy)

    return _tree.rebuild(skeleton, (), make)  # type: ignore[no-any-return]


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

    mapped = zipfile.is_zipfile(path)
    if not mapped:
        warnings.warn(
            f"{path} is in the format of torch before 1.6, or no checkpoint at all: it can't be "
            "mapped, and is loaded into memory whole",
            stacklevel=2,
        )
    elif options.verify:
        _check_zip(path)
    try:
        with plain_numpy():
            return torch.load(  # type: ignore[no-any-return]
                path, map_location="cpu", mmap=mapped, weights_only=not options.allow_pickle
            )
    except pickle.UnpicklingError as error:
        raise refused(path, error) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise unreadable(path, "it", error) from error


def _check_zip(path: str) -> None:
    """Compare the checksums that torch.save wrote; a mapped file is used without."""
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        raise unreadable(path, "it", error) from error
    if bad is not None:
        raise CorruptCheckpointError(
            f"{path}: the checksum of {bad} is not that which torch.save recorded; take another "
            "copy, or pass verify=False (--no-verify) if it was written without checksums",
            file=path,
        )


@contextlib.contextmanager
def plain_numpy() -> Any:
    """Let torch.load with ``weights_only`` read numpy's arrays and scalars of plain dtypes, too."""
    import torch

    try:
        import numpy
    except ImportError:
        yield
        return
    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    kinds = [getattr(numpy.dtypes, name) for name in dir(numpy.dtypes) if name.endswith("DType")]
    makers = [core.multiarray._reconstruct, core.multiarray.scalar]
    with torch.serialization.safe_globals([*makers, numpy.ndarray, numpy.dtype, *kinds]):
        yield


def refused(what: str, error: Exception) -> UnsupportedError:
    """Return the error for a pickle that could run any code."""
    return UnsupportedError(
        f"{what} holds more than tensors and plain values, and is not unpickled unless told: if "
        f"you trust who wrote it, pass allow_pickle=True (--allow-pickle). torch said: {error}"
    )


def unreadable(path: str, what: str, error: Exception) -> CorruptCheckpointError:
    """Return the error for a file that is not what it was written as."""
    return CorruptCheckpointError(f"{path}: {what} cannot be read: {error}", file=path)
