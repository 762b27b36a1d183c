"""The paths that callers give."""

from __future__ import annotations

import os
import pathlib
import re

from ringstow._errors import InvalidStateError, NoCheckpointError

StrPath = str | os.PathLike[str]

# pathlib makes ``s3:/bucket`` of ``s3://bucket``.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def absolute(path: StrPath) -> str:
    """Return the path from the root: a later chdir must not move a save in the background.

    ``~`` and ``~user`` at its beginning are home directories.

    Raises:
        InvalidStateError: it is a URL, or the home of a user that isn't known.
        ValueError: it is empty.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be str or os.PathLike[str], not {type(path).__name__}")
    if not text:
        raise ValueError("the path is empty")
    if _URL.match(text):
        raise InvalidStateError(
            f"{text} is a URL, and checkpoints are saved to and loaded from directories: mount the "
            "store and give the directory, or copy the checkpoint there once it is saved (a "
            f"directory of this name is ./{text})"
        )
    there = os.path.expanduser(text)
    if there.startswith("~"):
        user = text.partition("/")[0]
        raise InvalidStateError(
            f"{text}: nobody knows the home directory {user} (a directory of this name is ./{text})"
        )
    return str(pathlib.Path(there).absolute())


def of_checkpoint(path: StrPath) -> str:
    """Return the path of a checkpoint that is to be read, from the root.

    Raises:
        NoCheckpointError: there is none: what `latest` returned is None.
    """
    if path is None:
        raise NoCheckpointError(
            "there is no checkpoint: the path is None, as latest() returns it for a directory "
            "without one; start afresh, or look with ringstow.steps() why none can be loaded"
        )
    return absolute(path)
