"""Reads other programs' pickles without running code, with errors that say what to do."""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import io
import os
import pickle
import re
import types
from collections.abc import Iterator
from typing import Any

from ringstow._core import _files
from ringstow._core._errors import (
    CorruptCheckpointError,
    Error,
    FormatError,
    InvalidStateError,
    MissingFilesError,
    UnsupportedError,
)
from ringstow._foreign import _numpy_pickles
from ringstow._state.tree._walk import SAME_HASH_MAX

REMEDY = "take another copy of it, or an earlier checkpoint"


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the path to an OSError without one, such as a write's."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, path) from None
        raise


# Objects in checkpoints that consist only of attributes. No package is imported for them: each
# loads as the type named here.
_OBJECTS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "_io.BytesIO": io.BytesIO,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": types.SimpleNamespace,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": types.SimpleNamespace,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": types.SimpleNamespace,
}


def unpickled(source: Any, *, allow_pickle: bool = False, mmap: bool = False) -> Any:
    """Return the state that torch.save wrote to a file or stream, on the CPU, without running code.

    Besides tensors and plain values it may hold numpy arrays and scalars of plain dtypes,
    namespaces, and the small objects that DeepSpeed keeps beside its tensors.

    Args:
        source: a path, or a stream.
        allow_pickle: unpickle any value, which can run any code.
        mmap: map the file, which must be a zip archive.

    Raises:
        pickle.UnpicklingError: a value needs other classes.
        Exception: the file is damaged.
    """
    import torch

    if allow_pickle:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=False)
    from ringstow._state import _torch_private  # imports torch.distributed.checkpoint

    load = _torch_private.loader(
        _known({**_OBJECTS, **_numpy_pickles.replacements()}), _Integers().decoded
    )
    value = load(source, map_location="cpu", mmap=mmap, weights_only=True)
    return _numpy_pickles.with_arrays(value)


class _Integers:
    """Counts the long integers of one pickle: many equal hashes make a dict or set quadratic."""

    def __init__(self) -> None:
        self._found: set[int] = set()
        self._counts: collections.Counter[int] = collections.Counter()

    def decoded(self, data: bytes) -> int:
        """Return the integer of these bytes.

        Raises:
            ValueError: many integers have the same hash, whether or not they are keys.
        """
        number = pickle.decode_long(data)
        if number != (at := hash(number)) and number not in self._found:
            self._found.add(number)
            self._counts[at] += 1
            if self._counts[at] > SAME_HASH_MAX:
                raise ValueError(f"more than {SAME_HASH_MAX} of its keys have the same hash")
        return number


_DIGITS_MAX = 4300
# A long integer, as text or with its length before it.
_LONG = re.compile(rb"[IL](-?\d{19,})L?\n|\x8a(?=([\x08-\xff]))|\x8b(?=(....))", re.DOTALL)


def refuse_collisions(data: bytes) -> None:
    """Refuse a pickle, for Python's own unpickler, with many integers of equal hash.

    Raises:
        ValueError: the pickle has many, whether or not they are keys.
    """
    integers = _Integers()
    for match in _LONG.finditer(data):
        text, short, long = match.groups()
        if text is not None:
            if len(text) < _DIGITS_MAX:  # Python itself refuses longer ones
                number = int(text)
                integers.decoded(
                    number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
                )
            continue
        begin = match.end() + len(short or long)
        length = int.from_bytes(short or long, "little")
        integers.decoded(data[begin : begin + length])


def _known(named: dict[str, Any]) -> dict[str, Any]:
    """Return the classes by name: these, and classes that the program allows for ``weights_only``.

    Trainers allow numpy's own classes, which must not override the classes of the same name here.
    """
    from torch import serialization

    allowed = {
        _name_of(one): one[0] if isinstance(one, tuple) else one
        for one in serialization.get_safe_globals()
    }
    return {**allowed, **named}


def _name_of(allowed: Any) -> str:
    """Return the name under which torch finds an allowed class."""
    if isinstance(allowed, tuple):
        return str(allowed[1])
    return f"{allowed.__module__}.{allowed.__qualname__}"


def refused(what: str, error: Exception) -> UnsupportedError:
    """Return the error for a pickle that could run any code."""
    from ringstow._state import _torch_private  # imports torch

    return UnsupportedError(
        f"{what} holds more than tensors and plain values, or is damaged, so it is not unpickled: "
        "if you trust who wrote it, pass allow_pickle=True (--allow-pickle). torch said: "
        f"{_torch_private.refusal_of(error)}"
    )


def unreadable(path: str, what: str, error: Exception) -> CorruptCheckpointError:
    """Return the error for a damaged file."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return CorruptCheckpointError(
        f"{path}: {what} cannot be read, and is damaged or cut short ({said}); {REMEDY}", file=path
    )


_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES_MAX = 1024


def refuse_pointer(path: str) -> None:
    """Refuse a Git LFS pointer in place of the real file.

    Raises:
        MissingFilesError: the file is a pointer.
    """
    if not os.path.isfile(path) or os.path.getsize(path) > _POINTER_BYTES_MAX:
        return
    with _files.reading(path) as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        raise MissingFilesError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its "
            "repository, or download the file",
            path=path,
        )


@contextlib.contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Report any failure of torch or pickle as damage: a damaged pickle can raise anything.

    Raises:
        UnsupportedError: a pickle could run any code, or needs classes that are not installed.
        FormatError: the value is nested too deep.
        MissingFilesError: the file is in Git LFS.
        CorruptCheckpointError: any other failure except the system's.
        OSError: the system refused; names the file.
    """
    try:
        with naming(path):
            yield
    except MemoryError:
        raise
    except Exception as error:
        refuse_pointer(path)
        _report(path, what, error)
        raise


def _report(path: str, what: str, error: Exception) -> None:
    """Raise the error to report instead of this one; return if this one is to be raised."""
    if isinstance(error, Error):
        return
    if isinstance(error, pickle.UnpicklingError):
        raise refused(path if what == "it" else f"{path}: {what}", error) from error
    if isinstance(error, OSError):
        # An offset from a damaged file, for example a negative one.
        if error.errno == errno.EINVAL:
            raise unreadable(path, what, error) from error
        return
    if isinstance(error, RecursionError):
        raise FormatError(
            f"{path}: {what} is nested too deep to be read: load it with torch.load, and save it "
            "flat",
            path=path,
        ) from None
    if isinstance(error, UnicodeEncodeError) and not path.isprintable():
        raise InvalidStateError(
            f"torch cannot open {path!r}, whose name is not valid Unicode: rename it, or link to it"
        ) from error
    if isinstance(error, ImportError) or str(error).startswith("Can't get attribute"):
        raise UnsupportedError(
            f"{path}: {what} has values of classes that cannot be imported ({error}); install "
            "the packages it was saved with, or put them on PYTHONPATH"
        ) from error
    raise unreadable(path, what, error) from error
