"""Which saves Lightning must not overtake, where they write, and what may be removed.

Lightning takes whatever has a checkpoint's name for a complete checkpoint. A save makes its
directory when it begins and commits at its end, so a kill in between leaves a name without a
checkpoint. That does no harm to ``epoch=1-step=500.ckpt``, which nobody asks for unless it was
committed. It does to ``last.ckpt``.
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
# What Lightning's sharded strategies write beside the files of DCP.
_META = "meta.pt"
# How files of torch.save began before torch 1.6.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Names that Lightning looks for after a restart: ``last.ckpt``, ``last-v1.ckpt``, SLURM's
# ``hpc_ckpt_1.ckpt``, and any name of a user's without a number, such as ``on_exception.ckpt``.
_SOUGHT = re.compile(r"(last|hpc_ckpt_).*|[^0-9]*")


def needs_commit(path: str) -> bool:
    """Return whether Lightning may go on only once a save to this path has committed.

    - Nothing is committed beside it yet: a kill would leave no checkpoint at all, and a link that
      Lightning makes to it would lead to none.
    - Lightning looks for this name after a restart, and it does not lead to a checkpoint yet.
    - A link leads into the directory: ``ModelCheckpoint(save_last="link")`` points it to this
      checkpoint as soon as the call returns.
    """
    folder, name = os.path.split(path)
    if not _is_ours(path) and (_SOUGHT.fullmatch(name) or _is_replaced(path)):
        return True
    return not _has_checkpoint(folder) or any(map(_has_link_to(folder), (folder, _above(folder))))


def save_now(path: str, save: Callable[[str], object], *, striped: bool) -> None:
    """Save to a path, and let the path name nothing but a committed checkpoint.

    A save to a path with a checkpoint replaces it at the commit. Where nothing, a link or a file of
    torch.save is, the save writes to a directory beside it, which then takes its place.

    Args:
        path: the checkpoint's directory.
        save: saves to the path that it is given.
        striped: the files lie on several disks, each in a directory of the checkpoint's name: it
            cannot be renamed.

    Raises:
        InvalidStateError: the path is a file that torch.save did not write.
        OSError: the system refused.
    """
    beside = place_for(path, striped=striped)
    save(beside or path)
    if beside is not None:
        put(beside, path)


def place_for(path: str, *, striped: bool) -> str | None:
    """Return the directory beside a path that a save writes to first; None if it needs none.

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
    """Let a path name the checkpoint that was saved beside it.

    Raises:
        OSError: the system refused; what was at the path is still there.
    """
    _rename_when_complete.take_name(beside, path)
    _concurrent_saves.saved(path)


def remove(path: str, remove_ours: Callable[[], object]) -> None:
    """Remove the checkpoint at a path, if one is there, by ``remove_ours`` if it is ringstow's.

    Raises:
        InvalidStateError: something is there that is no checkpoint.
        NoCheckpointError: likewise, if it is a directory.
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
        except NotCommittedError:  # a killed save's
            prune(path)
    if os.path.isdir(path):
        _unlink(path, [_META])
        with contextlib.suppress(OSError):  # others' files are in it
            os.rmdir(path)


def _unlink(folder: str, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _is_ours(path: str) -> bool:
    return not os.path.islink(path) and os.path.isfile(os.path.join(path, _MANIFEST))


def _is_replaced(path: str) -> bool:
    """Return whether a link or a file is there, through or into which nothing must be written."""
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
    """Return a function that tells whether a directory holds a link to something in the folder."""
    real = os.path.realpath(folder)

    def holds(directory: str) -> bool:
        try:
            with os.scandir(directory) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
        except (FileNotFoundError, PermissionError):
            return False
        return any(os.path.dirname(os.path.realpath(link)) == real for link in links)

    return holds
