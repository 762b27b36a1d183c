"""Replaces a directory's checkpoint by a new one, for kinds without a commit of their own.

The new checkpoint is written into a directory beside the old one, ``NAME.convert.part``. When it is
complete, the two directories swap their names in one system call, so that the path holds either the
complete old checkpoint or the complete new one. The next conversion to that path removes what a
kill leaves beside it. On a file system that other hosts may use, that could be what another host is
writing: the next conversion refuses instead, and says what to remove.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator

from ringstow import _native
from ringstow._errors import BusyError
from ringstow.convert._paths import is_dcp, is_model, sync_dir

# Which files make up a checkpoint.
_KINDS: dict[str, Callable[[str], bool]] = {"dcp": is_dcp, "hf": is_model}

# Error numbers of `swap_names` on file systems that can't swap.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def beside(path: str) -> str:
    """Return where to write the checkpoint that replaces the one at a path."""
    return f"{path}.convert.part"


def aside(path: str) -> str:
    """Return where the old checkpoint waits on file systems that can't swap two directories."""
    return f"{path}.convert.old"


def put_back(path: str) -> None:
    """Put back an old checkpoint that a kill between two renames left beside its path.

    Raises:
        BusyError: another host may be between these renames.
        OSError: it can't be renamed.
    """
    path = os.path.realpath(path)
    if not os.path.lexists(path) and os.path.isdir(aside(path)):
        if _native.is_shared(aside(path)):
            raise _busy(aside(path), f"rename it to {path}")
        _put_back(path)


def _put_back(path: str) -> None:
    if not os.path.lexists(path) and os.path.isdir(aside(path)):
        os.rename(aside(path), path)
        sync_dir(os.path.dirname(path))


def _busy(left: str, remedy: str) -> BusyError:
    return BusyError(
        f"{left} is of a conversion that was killed, or that another host is running, and no lock "
        f"would show that: if none is running, {remedy}"
    )


@contextlib.contextmanager
def place(path: str, kind: str) -> Iterator[str]:
    """Yield where to write a checkpoint of this kind for a path.

    This is the path itself or, if a checkpoint is there, a directory beside it that takes its place
    when the block ends. If the block fails, the old checkpoint stays unchanged.

    Raises:
        BusyError: another conversion replaces the same checkpoint, or may be doing so on another
            host.
        OSError: the system refused; the old checkpoint stays.
    """
    path = os.path.realpath(path)
    is_part_of = _KINDS.get(kind)
    if is_part_of is None or not os.path.isdir(path):
        yield path
        return
    with contextlib.ExitStack() as locks:
        locks.enter_context(_locked(path))
        if _native.is_shared(path):
            _refuse_left(path)
        else:
            _clear_all(path, is_part_of)
        if any(map(is_part_of, os.listdir(path))):
            new = beside(path)
            try:
                _make_like(new, path)
            except FileExistsError:  # another host made it just now
                raise _busy(new, "remove it") from None
            try:
                yield new
                # After the swap this directory has the path's name, and others must still wait.
                locks.enter_context(_locked(new))
                _take_place(new, path, is_part_of)
            finally:
                _clear_all(path, is_part_of)
            return
    yield path


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        busy = BusyError(f"{directory} is being written by another process: wait for it to end")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        # Another conversion may have swapped the directory away between the two calls, and ended.
        if not os.path.samestat(os.fstat(handle), os.stat(directory)):
            raise busy
        yield
    finally:
        os.close(handle)


def _make_like(new: str, path: str) -> None:
    """Create a directory with the mode and owner of another."""
    os.mkdir(new, 0o700)
    like = os.stat(path)
    made = os.stat(new)
    if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
        os.chown(new, like.st_uid, like.st_gid)
    os.chmod(new, like.st_mode & 0o7777)


def _take_place(new: str, path: str, is_part_of: Callable[[str], bool]) -> None:
    """Swap the complete new checkpoint with the old one, after linking other programs' files."""
    for name in os.listdir(path):
        if not is_part_of(name):
            # Directories can't be linked, and some file systems can't link at all: `_clear` moves
            # the rest after the swap.
            with contextlib.suppress(OSError):
                os.link(os.path.join(path, name), os.path.join(new, name), follow_symlinks=False)
    sync_dir(new)
    try:
        _native.swap_names(new, path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        try:
            os.rename(path, aside(path))
            os.rename(new, path)
        except BaseException:  # also Ctrl-C, which Python raises right after a call
            _put_back(path)
            raise
    sync_dir(os.path.dirname(path))


def _refuse_left(path: str) -> None:
    for left in (beside(path), aside(path)):
        if os.path.lexists(left):
            raise _busy(left, f"move other programs' files from there to {path}, and remove it")


def _clear_all(path: str, is_part_of: Callable[[str], bool]) -> None:
    for left in (beside(path), aside(path)):
        _clear(left, path, is_part_of)


def _clear(left: str, path: str, is_part_of: Callable[[str], bool]) -> None:
    """Remove a directory beside a checkpoint: an unfinished new one, or the old one.

    Its model files are not needed, since the path holds a complete checkpoint. Other programs'
    files that are not at the path are moved there.
    """
    if not os.path.isdir(left) or os.path.islink(left) or not os.path.isdir(path):
        return
    for name in os.listdir(left):
        here, there = os.path.join(left, name), os.path.join(path, name)
        if is_part_of(name.removesuffix(".part")) or os.path.lexists(there):
            if os.path.isdir(here) and not os.path.islink(here):
                continue  # not ours: it stays, and so does the directory that holds it
            os.unlink(here)
        else:
            os.rename(here, there)
    sync_dir(path)
    with contextlib.suppress(OSError):
        os.rmdir(left)
    sync_dir(os.path.dirname(path))
