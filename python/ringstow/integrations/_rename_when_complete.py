"""Checkpoints that get their name once they are complete, by one rename.

Transformers and Accelerate take whatever has a checkpoint's name for a complete checkpoint. So a
save writes to a hidden directory beside it, and its last step is one rename. A removal begins with
a rename to a hidden name. What a killed process leaves under hidden names is removed by the next
save.
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
# An older checkpoint has this one until it is removed.
_REPLACED = ".ringstow_replaced-"

# What ringstow itself keeps in a directory of checkpoints under hidden names: docs/format.md.
_OF_THE_RUN = r"(?:run|node)\.json.*|history\.jsonl.*|keep-.*|manager|promotions|spares"

# What `begin` has begun, and what `kept` keeps. Each engine of a program saves in a thread.
_in_progress: set[str] = set()
_lock = threading.RLock()  # re-entrant: a signal handler may save, too

_log = logging.getLogger("ringstow")


def hidden(final: str) -> str:
    """Return the directory that a checkpoint is written to before it has its name."""
    run, name = os.path.split(final)
    return os.path.join(run, f"{_HIDDEN}{name}")


def is_hidden(name: str) -> bool:
    """Return whether a directory of this name has no name of a checkpoint yet, or any more."""
    return name.startswith((_HIDDEN, _REPLACED))


def replaced(final: str) -> str:
    """Return where a checkpoint is for a moment while another one takes its name."""
    run, name = os.path.split(final)
    return os.path.join(run, f"{_REPLACED}{name}")


def prepare(final: str, names: re.Pattern[str]) -> str:
    """Make the hidden directory for a checkpoint, and remove what killed processes left.

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
    """Do as `prepare` for all hidden names beside a checkpoint, until `end`.

    Saves of this process that are in progress beside it keep their directories.

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
    """Note that a save that `begin` began has ended."""
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
    """Give a replaced checkpoint its name back if nothing took it; remove other hidden ones.

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
            except OSError as error:  # such as NFS, while another process reads a file
                _log.warning("%s, which an earlier save left, stays: %s", path, error)


def complete(part: str, final: str, may_replace: Callable[[str], None] | None = None) -> None:
    """Make a hidden directory durable and give it its name; what had the name goes.

    Args:
        part: the hidden directory.
        final: the checkpoint's path.
        may_replace: raises if what has the name must stay.
    """
    sync(part)
    take_name(part, final, may_replace)


@contextlib.contextmanager
def discarding(part: str, final: str, *, removes: bool) -> Iterator[None]:
    """End the save if what follows fails, and remove its hidden directory if this rank removes."""
    try:
        yield
    except BaseException:  # also Ctrl-C
        if removes:
            shutil.rmtree(part, ignore_errors=True)
        end(final)
        raise


def keep_others(final: str, part: str, is_own: Callable[[str], bool]) -> None:
    """Put the user's files of a checkpoint that will be replaced into its successor.

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
    """Put a file or directory at a second place, without its bytes where links work."""
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
    """Give a durable directory its name; what had the name goes."""
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
    """Remove a checkpoint, so that a kill never leaves half of one under its name.

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
    """Delete a directory or a file; of a link only the link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _make_dirs(path: str) -> None:
    """Make a directory and those above it, and make their names durable."""
    above = os.path.dirname(path)
    if os.path.isdir(path) or above == path:
        return
    _make_dirs(above)
    os.makedirs(path, exist_ok=True)
    _native.sync_dir(above)
