"""The file ``.metadata``, for programs that check whether it exists.

``manifest.json`` is the commit of a checkpoint. This file is written after it and holds no data.
Torch's own reader unpickles it, and then fails with an error that names ringstow. The pickle names
this module, so the module keeps its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
from typing import Any, NoReturn

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import UnsupportedError

NAME = ".metadata"

# A text near the beginning of torch's own file.
_TORCHS = b"torch.distributed.checkpoint.metadata"
_START_BYTES = 256
_DATA_FILE = rb"__\d+_(?:\d+|convert)\.distcp"
_BYTES_MAX = 64 << 20
"""A longer ``.metadata`` is not searched: anyone could plant a huge file."""

_log = logging.getLogger("ringstow")


class _Mark:
    """Pickles to a call of `refuse`. Files on disk name both: do not move or rename them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> NoReturn:
    """Fail in torch's reader, which can't read this checkpoint.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "this is a ringstow checkpoint, which torch's FileSystemReader can't read: load it "
        "with ringstow.dcp.StorageReader, or call ringstow.dcp.use_by_default() first"
    )


def write(path: str) -> None:
    """Write the mark of a committed checkpoint, and remove a replaced one; log a failure.

    If it replaces a ``.metadata`` of torch's own writer, it also removes the files listed there.
    """
    target = os.path.join(path, NAME)
    temporary = f"{target}.part"  # a name that clean-ups remove after a kill
    try:
        dead = _listed_in(target)
        with _files.fresh(temporary) as file:
            pickle.dump(_Mark(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _native.sync_dir(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        _log.warning("%s is committed, but without %s: %s", path, NAME, error)
    else:
        _remove(path, dead)


def is_torchs(mark: str) -> bool:
    """Return whether a file is the ``.metadata`` of torch's own writer."""
    try:
        with _files.reading(mark) as file:
            return _TORCHS in file.read(_START_BYTES)
    except (
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        _files.OtherKindError,
    ):
        return False


def _remove(path: str, dead: list[str]) -> None:
    """Remove data files of the replaced checkpoint by torch; nothing refers to them now."""
    try:
        for name in dead:
            os.unlink(os.path.join(path, name))
    except OSError as error:
        _log.warning(
            "%s is committed, but files of the checkpoint that it replaces are left: %s. Remove "
            "its *.distcp files",
            path,
            error,
        )


def _listed_in(mark: str) -> list[str]:
    """Return the files that torch's ``.metadata`` lists; none if it is not torch's.

    Searches the pickle for the names without loading it: unpickling can run any code.
    """
    try:
        with _files.reading(mark, links=False) as file:
            start = file.read(_START_BYTES)
            if _TORCHS not in start:
                return []
            text = start + file.read(_BYTES_MAX + 1 - len(start))
    except OSError:  # missing, or not a regular file
        return []
    if len(text) > _BYTES_MAX:
        _log.warning(
            "%s has more than %d bytes and is not searched: the files of the checkpoint that is "
            "replaced stay. Remove its *.distcp files",
            mark,
            _BYTES_MAX,
        )
        return []
    named = set(re.findall(_DATA_FILE, text))
    here = os.listdir(os.path.dirname(mark))
    return [name for name in here if os.fsencode(name) in named]
