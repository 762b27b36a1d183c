"""Saves of this process in progress: one save a writer at a time, one session a directory.

DCP calls all hooks of a save in one thread, so a save belongs to its thread. A save has ended when
its thread has ended, or the thread pool's call that it is in, or when its thread uses a writer for
anything else. DCP does not tell a writer that a save failed between two hooks, nor that the
collectives after the last hook have ended. So other threads wait for the end of a thread that DCP
started for one save, or of a thread pool's call of DCP's own function. In all other cases they wait
until the last hook, and no longer than `_UNSEEN_S` from one hook to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from ringstow import _native
from ringstow._errors import InvalidStateError
from ringstow.dcp import _private
from ringstow.dcp._stream import StagingFuture

_POLL_S = 0.005
_UNSEEN_S = 10.0


class _Here(threading.local):
    save: Save | None = None


# The save that a thread began last, if it may still be within it.
_here = _Here()


def end_here() -> None:
    """Note that this thread's save has ended: the thread calls what DCP calls in no save."""
    if _here.save is not None:
        _here.save.is_over = True
        _here.save = None


class Save:
    """One save of a writer: what its hooks share."""

    def __init__(self, path: str) -> None:
        end_here()
        _here.save = self
        self.path = path
        """The directory that this process writes into."""
        self.rank: int | None = None
        self.is_alone = False
        """Whether each rank saves by itself."""
        self.commits = True
        """Whether this rank's last hook is `finish`, not `write_data`."""
        self.part_of: tuple[int, int, str] | None = None
        self.session = CommitSession(self)
        self.stream: StagingFuture | None = None
        """Of a background save that copies no tensor."""
        self.thread = threading.current_thread()
        self._pool_call = _private.pool_call()
        self.is_over = False
        """Whether DCP has returned from it, as far as this thread has shown."""
        self._is_done = False
        self._is_in_hook = False
        self._touched = time.monotonic()

    def own_rank(self) -> int:
        """Return this process's rank in the save."""
        if self.rank is not None:
            return self.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @contextlib.contextmanager
    def hook(self, *, is_last: bool = False) -> Iterator[None]:
        """Note that DCP is within one of the writer's hooks, and whether it calls another."""
        self._is_in_hook = True
        try:
            yield
        except BaseException:
            self._is_done = True
            raise
        finally:
            self._touched = time.monotonic()
            self._is_in_hook = False
        self._is_done = self._is_done or is_last

    def is_running(self) -> bool:
        """Tell whether another save of the writer, in another thread, has to wait for this one."""
        if self._has_ended():
            return False
        if self._is_in_hook or _private.is_save_thread(self.thread):
            return True
        if self._pool_call is not None and self._pool_call.is_save:
            return True
        return not self._is_done and time.monotonic() < self._touched + _UNSEEN_S

    def may_commit(self) -> bool:
        """Tell whether the save may still commit, as far as another thread can know."""
        return not (self._is_done or self._has_ended())

    def _has_ended(self) -> bool:
        is_here = self.thread is threading.current_thread()
        if is_here or self.is_over or not self.thread.is_alive():
            return True
        return self._pool_call is not None and self._pool_call.call() is None


class Turn:
    """Makes the saves of one writer run one after the other, in whatever threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save: Save | None = None

    def take(self, save: Save) -> None:
        """Wait until no other thread's save runs, then take the turn."""
        while True:
            with self._lock:
                if self._save is None or not self._save.is_running():
                    self._save = save
                    return
            time.sleep(_POLL_S)


class CommitSession:
    """The coordinator's lock on a directory, from its plan to the commit, and what goes with it.

    Each save has one. After a save that failed unseen it stays until the writer's next save, or
    until another writer of this process saves into the directory.
    """

    def __init__(self, save: Save) -> None:
        self._session: _native.Session | None = None
        self._save = weakref.ref(save)
        self._pid = os.getpid()
        self.path = ""

    def open(
        self, path: str, world_size: int, config: str, part_of: tuple[int, int, str] | None = None
    ) -> None:
        """Lock the directory for a save by ``world_size`` ranks, and the stripe directories.

        Args:
            path: the directory.
            world_size: the number of ranks that write into it.
            config: the configuration, in JSON.
            part_of: which rank's part it is, if each rank saves by itself.

        Raises:
            BusyError: another save into the directory is in progress.
            InvalidStateError: the directory holds another program's safetensors files.
            OSError: the directory can't be made or locked.
        """
        self.abandon()
        with _lock:
            other = _sessions.get(path)
        if other is not None and not other.may_commit():
            other.abandon()
        self._session = _native.Session(path, world_size, config, part_of)
        self.path, self._pid = path, os.getpid()
        with _lock:
            _sessions[path] = self

    def commit(self, receipts: list[bytes], state: str, names: list[str]) -> dict[str, object]:
        """Commit what the ranks wrote, and return the native side's report.

        Raises:
            InvalidStateError: there was no plan, or ranks or regions of tensors are missing.
            OSError: the system refused.
        """
        session = self._session
        if session is None:
            raise InvalidStateError("finish() came without prepare_global_plan() before it")
        try:
            done: dict[str, object] = json.loads(session.commit(receipts, state, names))
        except BaseException:
            self.abandon()
            raise
        self._let_go()
        return done

    def abandon(self) -> None:
        """Remove what the ranks wrote, unless it was committed."""
        session = self._let_go()
        if session is None:
            return
        if self._pid != os.getpid():
            _inherited.append(session)  # a forked child must not clean up its parent's save
        else:
            session.abandon()

    def may_commit(self) -> bool:
        """Tell whether the save may still commit, in another thread than this one."""
        save = self._save()
        return save is not None and save.may_commit()

    def _let_go(self) -> _native.Session | None:
        with _lock:
            session, self._session = self._session, None
            if _sessions.get(self.path) is self:
                del _sessions[self.path]
        return session


class CommitSessions:
    """The sessions of one writer's saves that run, or that failed."""

    def __init__(self) -> None:
        self._open: list[CommitSession] = []

    def add(self, session: CommitSession) -> None:
        """Add a new save's, and abandon those of saves that have ended."""
        for other in list(self._open):
            if not other.may_commit():
                self._open.remove(other)
                other.abandon()
        self._open.append(session)

    def abandon(self) -> None:
        """Abandon them all."""
        while self._open:
            self._open.pop().abandon()


# Re-entrant: the garbage collector may end a writer anywhere.
_lock = threading.RLock()
# By the directory that each has locked.
_sessions: weakref.WeakValueDictionary[str, CommitSession] = weakref.WeakValueDictionary()
_inherited: list[_native.Session] = []


def _after_fork() -> None:
    """Make a new lock in a forked child: another thread of the parent may have held the old one."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
