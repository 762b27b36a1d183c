"""The paths that callers give."""

from __future__ import annotations

import os
import pathlib

StrPath = str | os.PathLike[str]


def absolute(path: StrPath) -> str:
    """Return the path from the root: a later chdir must not move a save in the background."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be str or os.PathLike[str], not {type(path).__name__}")
    if not text:
        raise ValueError("the path is empty")
    return str(pathlib.Path(text).absolute())
