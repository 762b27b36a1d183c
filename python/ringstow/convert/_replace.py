"""Puts a directory's new checkpoint in the place of its old one, when the new one is written.

Of kinds that are several files without a commit of their own. What is replaced stands until all of
the new is on the disk; the change itself is a few renames.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

from ringstow.convert._paths import is_dcp, is_model, sync_dir

# Which files make up a checkpoint, and the one that makes a checkpoint of several.
_KINDS: dict[str, tuple[Callable[[str], bool], str]] = {
    "dcp": (is_dcp, ".metadata"),
    "hf": (is_model, "model.safetensors.index.json"),
}


@contextlib.contextmanager
def place(path: str, kind: str) -> Iterator[str]:
    """Yield where to write a checkpoint of this kind that is to be at a path in the end.

    That is the path itself, unless there is one to be replaced: then a directory beside it, whose
    files go there when the block ends. If it fails, the old checkpoint stays as it is.
    """
    is_part_of, mark = _KINDS.get(kind, (None, ""))
    if is_part_of is None or not os.path.isdir(path) or not any(map(is_part_of, os.listdir(path))):
        yield path
        return
    where, name = os.path.split(path)
    beside = tempfile.mkdtemp(prefix=f"{name}.", suffix=".part", dir=where)
    try:
        yield beside
        _move(beside, path, is_part_of, mark)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move(new: str, path: str, is_part_of: Callable[[str], bool], mark: str) -> None:
    """Replace the old files by the new: without the old mark first, with the new one last."""
    old = [name for name in os.listdir(path) if is_part_of(name)]
    names = sorted(os.listdir(new), key=lambda name: name == mark)
    if mark in old:
        os.unlink(os.path.join(path, mark))
        sync_dir(path)
    for name in names:
        if name == mark:
            _remove(path, {*old} - {*names, mark})
        os.rename(os.path.join(new, name), os.path.join(path, name))
    _remove(path, {*old} - {*names, mark})
    sync_dir(path)


def _remove(path: str, names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    sync_dir(path)
