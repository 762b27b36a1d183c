"""Writes a conversion beside its target and then renames it, for kinds without a commit.

A checkpoint that replaces a directory is written into a directory beside it, ``NAME.convert.part``.
When it is complete, it is renamed to the path, so that the path holds either the complete old
checkpoint or the complete new one. The old one, now ``NAME.convert.old``, is removed once the
rename is durable. A file is written to ``NAME.part`` and then renamed. Locks exclude two
conversions to one path, and anything that appears at the path meanwhile is replaced only on
request. The next conversion to that path removes the leftovers of a kill. On a file system that
other hosts may use, another host could be writing them: the next conversion then refuses, and says
what to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import (
    BusyError,
    CorruptCheckpointError,
    Error,
    NotDurableError,
    ReplacedCheckpointError,
)
from ringstow._publish._checkpoint_kinds import (
    DCP_DATA,
    commit_of,
    is_dcp,
    is_model,
    is_unfinished_dcp,
    taken,
)

# Which files make up a checkpoint.
_KINDS: dict[str, Callable[[str], bool]] = {"dcp": is_dcp, "hf": is_model}

_log = logging.getLogger("ringstow")


def beside(path: str) -> str:
    """Return the path at which to write the checkpoint that replaces another one."""
    return f"{path}.convert.part"


def aside(path: str) -> str:
    """Return the path of the old checkpoint until its removal."""
    return f"{path}.convert.old"


def put_back(path: str) -> None:
    """Restore an old checkpoint that a kill between two renames left beside its path.

    Raises:
        BusyError: another conversion may be between these renames.
        OSError: the checkpoint can't be renamed.
    """
    path = os.path.realpath(path)
    if not os.path.lexists(path) and os.path.isdir(aside(path)):
        if _native.shared_file_system(aside(path)):
            raise _busy(aside(path), f"rename it to {path}")
        with _locked(aside(path)):
            _put_back(path)


def _put_back(path: str) -> None:
    if not os.path.lexists(path) and os.path.isdir(aside(path)):
        os.rename(aside(path), path)
        _native.sync_dir(os.path.dirname(path))


def _busy(left: str, remedy: str) -> BusyError:
    return BusyError(
        f"{left} is of a conversion or export that was killed, or that another host is running, "
        f"and no lock would show that: if none is running, {remedy}"
    )


@contextlib.contextmanager
def place(path: str, kind: str, check: Callable[[], None], *, overwrite: bool) -> Iterator[str]:
    """Yield the path at which to write a checkpoint of this kind.

    This is the path itself, or a path beside it that replaces it when the block ends. If the block
    fails, the contents of the path stay unchanged.

    Args:
        path: the target.
        kind: the kind of checkpoint to write.
        check: raises if the path must not be replaced. Called again once no other conversion writes
            there.
        overwrite: whether the contents of the path may be replaced.

    Raises:
        BusyError: another conversion writes to the same path, or may be doing so on another host.
        NotDurableError: the new checkpoint is complete, but may not survive a crash.
        OSError: the system refused, or the path exists; it is unchanged.
    """
    path = os.path.realpath(path)
    if kind == "torch":
        with _file(path, check, overwrite=overwrite) as part:
            yield part
    elif kind == "dcp" and not os.path.isdir(path):
        with _new_directory(path):
            check()
            yield path
    elif kind in _KINDS and os.path.isdir(path):
        with _directory(path, kind, check) as to:
            yield to
    else:  # the native writer itself locks and refuses
        yield path


@contextlib.contextmanager
def _new_directory(path: str) -> Iterator[None]:
    """Create a directory, lock it, and make its name durable; remove it if the block fails."""
    to = pathlib.Path(path)
    made = [directory for directory in (to, *to.parents) if not directory.exists()]
    to.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                for directory in made:
                    directory.rmdir()
            raise
        for directory in made:
            _sync_name(path, str(directory))


@contextlib.contextmanager
def _directory(path: str, kind: str, check: Callable[[], None]) -> Iterator[str]:
    is_part_of = _KINDS[kind]
    with contextlib.ExitStack() as locks:
        locks.enter_context(_locked(path))
        check()
        if _native.shared_file_system(path):
            _refuse_left(path)
        else:
            _clear_all(path, is_part_of)
        if kind == "dcp":
            _clear_unfinished(path)
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
            except BaseException as first:
                try:
                    _clear_all(path, is_part_of)
                except OSError as error:  # the caller must see the first error
                    _log.warning("could not remove what was written beside %s: %s", path, error)
                _name_target(first, new, path)
                raise
            _sync_name(path)  # a crash could undo the swap until then: the old one stays
            _clear_replaced(path, is_part_of)
            return
        if kind == "dcp":
            yield path
            return
    yield path  # an export takes the lock itself


@contextlib.contextmanager
def _file(path: str, check: Callable[[], None], *, overwrite: bool) -> Iterator[str]:
    part = f"{path}.part"
    if os.path.lexists(part):
        if not stat.S_ISREG(os.lstat(part).st_mode):
            raise taken(part, "is there already and not a file")
        if _native.shared_file_system(part):
            raise _busy(part, "remove it")
        with _locked(part):
            os.unlink(part)
    try:
        _files.new(part).close()
    except FileExistsError:  # another conversion made it just now
        raise _busy(part, "remove it") from None
    with _locked(part):
        try:
            check()
            yield part
            if overwrite:
                os.rename(part, path)
            else:
                _native.rename_new(part, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            _name_target(error, part, path)
            raise
        _sync_name(path)


class Outcome(contextlib.AbstractContextManager["Outcome"]):
    """If the new checkpoint is complete, adds a note to an exception such as Ctrl-C.

    Ctrl-C can come between any two steps, also directly after the commit. So this checks the file
    that commits, at the beginning and after an exception.
    """

    is_placed = False
    """Whether the target was written, so that an error belongs to the comparison."""

    def __init__(self, path: str, kind: str) -> None:
        self._path, self._kind = path, kind
        self._before = commit_of(path, kind)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # These errors say so themselves.
        says_so = (CorruptCheckpointError, NotDurableError, ReplacedCheckpointError)
        if error is None or isinstance(error, says_so):
            return
        # Before that, an error means that nothing was committed, unless by another process.
        if not self.is_placed and isinstance(error, (Error, OSError)):
            return
        if commit_of(self._path, self._kind) not in (None, self._before):
            error.add_note(complete(self._path, verified=False))


def complete(path: str, *, verified: bool) -> str:
    """Return a sentence that a target is complete."""
    but = ", and verified" if verified else ", but not verified"
    return f"{path} is written and complete{but}"


def _name_target(error: BaseException, temporary: str, path: str) -> None:
    """Name the target in an error of the system: the caller does not know the other name."""
    if isinstance(error, OSError) and str(error.filename).startswith(temporary):
        error.filename = path + error.filename.removeprefix(temporary)


def _sync_name(path: str, made: str | None = None) -> None:
    """Make the new name of a complete checkpoint durable, or of a directory above it."""
    try:
        _native.sync_dir(os.path.dirname(made or path))
    except OSError as error:
        raise NotDurableError(
            f"{path} is written and complete, but its name may not survive a crash ({error}): "
            "convert again, best to another disk",
            path=path,
            errno=error.errno,
        ) from error


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    busy = BusyError(f"{path} is being written by another process: wait for it to end")
    try:
        handle = _files.to_lock(path)
    except FileNotFoundError:  # another conversion has just renamed or removed it
        raise busy from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_it = os.path.samestat(os.fstat(handle), os.lstat(path))
        except (BlockingIOError, FileNotFoundError):
            raise busy from None
        # Another conversion may have renamed it between the two calls, and ended.
        if not is_it:
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
        if not is_part_of(name.removesuffix(".part")):
            # Directories can't be linked, and some file systems can't link at all: `_clear` moves
            # the rest after the swap.
            with contextlib.suppress(OSError):
                os.link(os.path.join(path, name), os.path.join(new, name), follow_symlinks=False)
    _native.sync_dir(new)
    _files.take_place(new, path, aside(path))


def _refuse_left(path: str) -> None:
    for left in (beside(path), aside(path)):
        if os.path.lexists(left):
            raise _busy(left, f"move other programs' files from there to {path}, and remove it")


def _clear_unfinished(path: str) -> None:
    """Remove leftovers of a killed conversion to ``dcp`` at a path that was empty before."""
    names = os.listdir(path)
    if not is_unfinished_dcp(names):
        return
    if _native.shared_file_system(path):
        raise _busy(os.path.join(path, DCP_DATA), f"remove all files in {path}")
    remove_dcp(path, names)


def remove_dcp(path: str, names: list[str]) -> None:
    """Remove files of a conversion to ``dcp``, also after a loss of power in between."""
    for name in sorted(names, key=DCP_DATA.__eq__):
        if name == DCP_DATA and len(names) > 1:
            with contextlib.suppress(OSError):  # the disk may be failing
                _native.sync_dir(path)  # this file identifies the others, so it is removed last
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))


def _clear_replaced(path: str, is_part_of: Callable[[str], bool]) -> None:
    try:
        _clear_all(path, is_part_of)
    except OSError as error:
        _log.warning(
            "%s is written, but what it replaces is left: %s. The next one there removes it",
            path,
            error,
        )


def _clear_all(path: str, is_part_of: Callable[[str], bool]) -> None:
    for left in (beside(path), aside(path)):
        _clear(left, path, is_part_of)


def _clear(left: str, path: str, is_part_of: Callable[[str], bool]) -> None:
    """Remove a directory beside a checkpoint: an unfinished new one, or the old one.

    Its model files are not needed, since the path holds a complete checkpoint. Other programs'
    files are moved to the path, if they are missing there.
    """
    if not os.path.isdir(left) or os.path.islink(left) or not os.path.isdir(path):
        return
    # A killed conversion may not have made the swap durable.
    _native.sync_dir(os.path.dirname(path))
    for name in os.listdir(left):
        here, there = os.path.join(left, name), os.path.join(path, name)
        if is_part_of(name.removesuffix(".part")) or os.path.lexists(there):
            if os.path.isdir(here) and not os.path.islink(here):
                continue  # not ours: keep it and its directory
            os.unlink(here)
        else:
            os.rename(here, there)
    _native.sync_dir(path)
    with contextlib.suppress(OSError):
        os.rmdir(left)
    _native.sync_dir(os.path.dirname(path))
