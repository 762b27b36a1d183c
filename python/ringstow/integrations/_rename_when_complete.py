"""Checkpoints that are renamed to their final path once they are complete.

Transformers and Accelerate assume that any path with a checkpoint's name is complete. So a save
writes to a hidden directory beside it, and its last step is one rename. A removal begins with a
rename to a hidden name. The next save removes hidden leftovers of a killed process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator

from ringstow import _native
from ringstow._core import _files

_HIDDEN = ".ringstow-"
# The suffix of an older checkpoint until it is removed.
_REPLACED = ".ringstow_replaced-"

# Hidden names that ringstow itself uses in a directory of checkpoints: docs/format.md.
_OF_THE_RUN = r"(?:run|node)\.json.*|history\.jsonl.*|keep-.*|manager|promotions|spares"

# Directories of `begin` and files of `kept`. Each engine of a program saves in a thread.
_in_progress: set[str] = set()
_lock = threading.RLock()  # re-entrant: a signal handler may save, too

_log = logging.getLogger("ringstow")


def hidden(final: str) -> str:
    """Return the hidden directory to which a checkpoint is written before its rename."""
    run, name = os.path.split(final)
    return os.path.join(run, f"{_HIDDEN}{name}")


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden: a checkpoint not yet complete, or being removed."""
    return name.startswith((_HIDDEN, _REPLACED))


def replaced(final: str) -> str:
    """Return the hidden path of a checkpoint while another one replaces it."""
    run, name = os.path.split(final)
    return os.path.join(run, f"{_REPLACED}{name}")


def prepare(final: str, names: re.Pattern[str]) -> str:
    """Make the hidden directory for a checkpoint, and remove leftovers of killed processes.

    Args:
        final: the checkpoint's path.
        names: which names in its directory belong to this run.

    Returns:
        The hidden directory.

    Raises:
        OSError: the system refused.
    """
    run = os.path.dirname(final)
    _make_dirs(run)
    recover(run, names)
    part = hidden(final)
    os.mkdir(part)
    return part


def begin(final: str) -> str:
    """Like `prepare`, for all hidden names beside a checkpoint, until `end`.

    Keeps the directories of this process's other saves in progress.

    Returns:
        The hidden directory.
    """
    run, own = os.path.split(final)
    with _lock:
        beside = [os.path.basename(one) for one in _in_progress if os.path.dirname(one) == run]
        busy = "|".join(map(re.escape, beside)) or "(?!)"
        others = rf"(?!(?:{_OF_THE_RUN})\Z).*"
        names = re.compile(rf"(?!(?:{busy})\Z)(?:{re.escape(own)}|{others})", re.DOTALL)
        part = prepare(final, names)
        _in_progress.add(final)
    return part


def end(final: str) -> None:
    """Note the end of a save that `begin` began."""
    with _lock:
        _in_progress.discard(final)


@contextlib.contextmanager
def kept(final: str) -> Iterator[str]:
    """Yield the hidden name of a file that `begin`, in another thread, must not remove."""
    with _lock:
        _in_progress.add(final)
    try:
        yield hidden(final)
    finally:
        end(final)


def recover(run: str, names: re.Pattern[str]) -> None:
    """Restore a replaced checkpoint's name if the path is free; remove other hidden directories.

    Args:
        run: the directory of the checkpoints.
        names: which names in it belong to this run.
    """
    if not os.path.isdir(run):
        return
    for entry in os.listdir(run):
        path = os.path.join(run, entry)
        prefix = next((one for one in (_HIDDEN, _REPLACED) if entry.startswith(one)), None)
        if prefix is None or names.fullmatch(entry.removeprefix(prefix)) is None:
            continue
        final = os.path.join(run, entry.removeprefix(prefix))
        if prefix == _REPLACED and not os.path.lexists(final):
            os.rename(path, final)
            _native.sync_dir(run)
        else:
            try:
                _delete(path)
            except OSError as error:  # for example on NFS, while another process reads a file
                _log.warning("%s, which an earlier save left, stays: %s", path, error)


def complete(part: str, final: str, may_replace: Callable[[str], None] | None = None) -> None:
    """Make a hidden directory durable and rename it, replacing the path's earlier contents.

    Args:
        part: the hidden directory.
        final: the checkpoint's path.
        may_replace: raises if the path's current contents must stay.
    """
    sync(part)
    take_name(part, final, may_replace)


@contextlib.contextmanager
def discarding(part: str, final: str, *, removes: bool) -> Iterator[None]:
    """If the block fails, end the save, and remove its hidden directory if this rank removes."""
    try:
        yield
    except BaseException:  # also Ctrl-C
        if removes:
            shutil.rmtree(part, ignore_errors=True)
        end(final)
        raise


def keep_others(final: str, part: str, is_own: Callable[[str], bool]) -> None:
    """Copy the user's files of a checkpoint to its successor.

    Args:
        final: the checkpoint's path.
        part: the hidden directory of its successor.
        is_own: whether the framework writes a file of this name.
    """
    for name in os.listdir(final) if os.path.isdir(final) else ():
        target = os.path.join(part, name)
        if not is_own(name) and not os.path.lexists(target):
            link(os.path.join(final, name), target)


def link(source: str, target: str) -> None:
    """Link a file or directory to a second path, or copy it if links do not work."""
    if os.path.isdir(source) and not os.path.islink(source):
        os.mkdir(target)
        for name in os.listdir(source):
            link(os.path.join(source, name), os.path.join(target, name))
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no links
        shutil.copy2(source, target, follow_symlinks=False)


def sync(path: str) -> None:
    """Make all files and names below a directory durable."""
    for folder, _, names in os.walk(path):
        for name in names:
            _files.sync(os.path.join(folder, name))
        _native.sync_dir(folder)


def take_name(part: str, final: str, may_replace: Callable[[str], None] | None = None) -> None:
    """Rename a durable directory, replacing the path's earlier contents."""
    run = os.path.dirname(final)
    if not os.path.lexists(final):
        os.rename(part, final)
        _native.sync_dir(run)
        return
    if may_replace is not None:
        may_replace(final)
    old = replaced(final)
    _files.take_place(part, final, old)
    _native.sync_dir(run)
    with contextlib.suppress(OSError):
        _delete(old)  # or the next save does


def remove(path: str, limit: str) -> None:
    """Remove a checkpoint, so that a kill never leaves an incomplete one at its path.

    Args:
        path: the checkpoint.
        limit: the framework's name of the limit that it is over, for the log.
    """
    gone = hidden(path)
    try:
        os.rename(path, gone)
        _delete(gone)
    except OSError as error:
        _log.warning("%s is over %s and could not be removed: %s", path, limit, error)


def _delete(path: str) -> None:
    """Delete a directory, a file or a link, but not a link's target."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _make_dirs(path: str) -> None:
    """Make a directory and its parents, and make their names durable."""
    above = os.path.dirname(path)
    if os.path.isdir(path) or above == path:
        return
    _make_dirs(above)
    os.makedirs(path, exist_ok=True)
    _native.sync_dir(above)
