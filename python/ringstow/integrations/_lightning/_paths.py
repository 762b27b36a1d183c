"""Decides which saves Lightning must wait for, where they write, and what may be removed.

Lightning assumes that any path with a checkpoint's name is a complete checkpoint. A save makes its
directory when it begins and commits at its end, so a kill in between leaves a name without a
checkpoint. That is harmless for ``epoch=1-step=500.ckpt``, which is only used if it was committed,
but not for ``last.ckpt``.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Callable

from ringstow._core import _files
from ringstow._core._errors import InvalidStateError, NotCommittedError
from ringstow._ranks import _concurrent_saves
from ringstow._reading._run_steps import prune
from ringstow.integrations import _rename_when_complete

_MANIFEST = "manifest.json"
# The file that Lightning's sharded strategies write beside the files of DCP.
_META = "meta.pt"
# The first bytes of files of torch.save before torch 1.6.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Names that Lightning searches for after a restart: ``last.ckpt``, ``last-v1.ckpt``, SLURM's
# ``hpc_ckpt_1.ckpt``, and any name without a number, such as ``on_exception.ckpt``.
_SOUGHT = re.compile(r"(last|hpc_ckpt_).*|[^0-9]*")


def needs_commit(path: str) -> bool:
    """Return whether Lightning must wait until a save to this path has committed.

    - Nothing is committed beside it yet: a kill would leave no checkpoint at all, and Lightning's
      link to it would be broken.
    - Lightning searches for this name after a restart, and it is not a checkpoint yet.
    - The path is the target of a link: ``ModelCheckpoint(save_last="link")`` points a link to this
      checkpoint as soon as the call returns.
    """
    folder, name = os.path.split(path)
    if not _is_ours(path) and (_SOUGHT.fullmatch(name) or _is_replaced(path)):
        return True
    return not _has_checkpoint(folder) or any(map(_has_link_to(folder), (folder, _above(folder))))


def save_now(path: str, save: Callable[[str], object], *, striped: bool) -> None:
    """Save to a path such that the path is never an uncommitted checkpoint.

    A save to a path with a checkpoint replaces it at the commit. If the path is missing, a link or
    a file of torch.save, the save writes to a directory beside it, which then replaces it.

    Args:
        path: the checkpoint's directory.
        save: a function that saves to a path.
        striped: whether the files are on several disks, each in a directory of the checkpoint's
            name, so that it cannot be renamed.

    Raises:
        InvalidStateError: the path is a file that torch.save did not write.
        OSError: the system refused.
    """
    beside = place_for(path, striped=striped)
    save(beside or path)
    if beside is not None:
        put(beside, path)


def place_for(path: str, *, striped: bool) -> str | None:
    """Return the directory beside a path to which a save first writes; None if not needed.

    Raises:
        InvalidStateError: the path is a file that torch.save did not write.
    """
    folder, name = os.path.split(path)
    _rename_when_complete.recover(folder, re.compile(re.escape(name)))
    if _is_replaced(path):
        _refuse_other_file(path)
    elif striped or os.path.lexists(path):
        return None
    return _rename_when_complete.hidden(path)


def put(beside: str, path: str) -> None:
    """Move the checkpoint that was saved beside a path to the path.

    Raises:
        OSError: the system refused; the path is unchanged.
    """
    _rename_when_complete.take_name(beside, path)
    _concurrent_saves.saved(path)


def remove(path: str, remove_ours: Callable[[], object]) -> None:
    """Remove the checkpoint at a path, if it exists; by ``remove_ours`` if it is ringstow's.

    Raises:
        InvalidStateError: the path is not a checkpoint.
        NoCheckpointError: the path is a directory without a checkpoint.
    """
    if not os.path.lexists(path):
        return
    if _is_replaced(path):
        _refuse_other_file(path)
        os.unlink(path)
        return
    names = os.listdir(path)
    if ".metadata" in names and _MANIFEST not in names:
        _unlink(path, [".metadata", *(name for name in names if name.endswith(".distcp"))])
    else:
        try:
            remove_ours()
        except NotCommittedError:  # the remains of a killed save
            prune(path)
    if os.path.isdir(path):
        _unlink(path, [_META])
        with contextlib.suppress(OSError):  # it holds other programs' files
            os.rmdir(path)


def _unlink(folder: str, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _is_ours(path: str) -> bool:
    return not os.path.islink(path) and os.path.isfile(os.path.join(path, _MANIFEST))


def _is_replaced(path: str) -> bool:
    """Return whether the path is a link or a file, which a save must not follow or overwrite."""
    return os.path.islink(path) or os.path.isfile(path)


def _refuse_other_file(path: str) -> None:
    if not os.path.islink(path) and not is_stock(path):
        raise InvalidStateError(
            f"{path} is a file that torch.save did not write, so it is neither replaced nor "
            "removed: move it away"
        )


def is_stock(path: str) -> bool:
    """Return whether torch.save wrote a file."""
    with _files.reading(path) as file:
        if file.read(len(_LEGACY)) == _LEGACY:
            return True
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())


def _above(folder: str) -> str:
    return os.path.dirname(folder)


def _has_checkpoint(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(_is_ours(entry.path) for entry in entries)
    except FileNotFoundError:
        return False


def _has_link_to(folder: str) -> Callable[[str], bool]:
    """Return a function that returns whether a directory holds a link into the folder."""
    real = os.path.realpath(folder)

    def holds(directory: str) -> bool:
        try:
            with os.scandir(directory) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
        except (FileNotFoundError, PermissionError):
            return False
        return any(os.path.dirname(os.path.realpath(link)) == real for link in links)

    return holds
