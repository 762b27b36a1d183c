"""Which saves of this process are under way: one save a writer at a time, one session a directory.

DCP calls all hooks of a save in one thread, so each hook finds its `Save` by its thread. What DCP
does not tell a writer is that a save has failed while it was planned, and that the collectives
after `finish` have ended. Only for that, and only to decide whether another save has to wait,
`is_saving` looks at the thread's stack. Under a torch whose functions have other names no save is
recognised there: saves may then overlap, and never mix.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType

import torch.distributed as dist

from ringstow import _native
from ringstow._errors import InvalidStateError

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_PROCESS = "torch.distributed.checkpoint._async_process_executor"
# The functions of torch within which a thread is busy with a save.
_FUNCTIONS = {(_SAVER, "save"), (_SAVER, "_save_state_dict"), (_PROCESS, "_execute_save_impl")}

_POLL_S = 0.005
# How long another save waits for one that no stack shows, from its latest hook on. It may have
# failed without a word.
_UNSEEN_S = 10.0


def is_saving(thread: threading.Thread) -> bool:
    """Tell whether a thread is within a save of torch.distributed.checkpoint."""
    if not thread.is_alive() or thread.ident is None:
        return False
    frame: FrameType | None = sys._current_frames().get(thread.ident)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _FUNCTIONS:
            return True
        frame = frame.f_back
    return False


class _Latest(threading.local):
    """The save that a thread began last."""

    save: Save | None = None


_latest = _Latest()


class Save:
    """One save of a writer: what its hooks share."""

    def __init__(self, path: str) -> None:
        self.path = path
        """The directory that this process writes into."""
        self.rank: int | None = None
        self.is_alone = False
        """Whether each rank saves by itself."""
        self.commits = True
        """Whether this rank's last hook is `finish`, not `write_data`."""
        self.part_of: tuple[int, int, str] | None = None
        self.hold = Coordinator(self)
        self.thread = threading.current_thread()
        self._is_seen = is_saving(self.thread)
        self._is_ended = False
        self._is_in_hook = False
        self._touched = time.monotonic()
        # A thread has one save at a time: the one before has ended, however that was.
        if _latest.save is not None:
            _latest.save.end()
        _latest.save = self

    def own_rank(self) -> int:
        """Return this process's rank in the save."""
        if self.rank is not None:
            return self.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @contextlib.contextmanager
    def hook(self, *, is_last: bool = False) -> Iterator[None]:
        """Note that DCP is within one of the writer's hooks, and that this one ends the save."""
        self._is_in_hook = True
        try:
            yield
        except BaseException:
            self._is_ended = True
            raise
        finally:
            self._touched = time.monotonic()
            self._is_in_hook = False
        self._is_ended = self._is_ended or is_last

    def end(self) -> None:
        """Note that the save has ended, and so has all that DCP does after it."""
        self._is_ended, self._is_seen = True, False

    def is_running(self) -> bool:
        """Tell whether another thread's save has to wait for this one."""
        if not self._may_run():
            return False
        return self._is_seen or self._is_in_hook or time.monotonic() < self._touched + _UNSEEN_S

    def is_busy(self) -> bool:
        """Tell whether the save may still commit, as far as another thread can know."""
        return self._may_run()

    def _may_run(self) -> bool:
        if self.thread is threading.current_thread() or not self.thread.is_alive():
            return False
        if self._is_seen:  # up to the last collective, which no hook tells of
            return is_saving(self.thread)
        return not self._is_ended


class Turn:
    """Lets the saves of one writer go one after the other, whatever thread each runs in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save: Save | None = None

    def take(self, save: Save) -> None:
        """Wait until no other thread's save runs; from then on it is this one's turn."""
        while True:
            with self._lock:
                if self._save is None or not self._save.is_running():
                    self._save = save
                    return
            time.sleep(_POLL_S)


class Coordinator:
    """The coordinator's hold on a directory, from its plan to the commit; nothing in between saves.

    There is one a save. It outlives a failed save, whose end nobody tells of, until the same
    writer's next one, or another writer's in this process that wants the directory.
    """

    def __init__(self, save: Save) -> None:
        self._session: _native.Session | None = None
        self._save = weakref.ref(save)
        self._pid = os.getpid()
        self.path = ""

    def open(
        self, path: str, world_size: int, config: str, part_of: tuple[int, int, str] | None = None
    ) -> None:
        """Take the directory for a save by ``world_size`` ranks, and those it is striped over.

        Args:
            path: the directory.
            world_size: how many ranks write into it.
            config: the knobs, in JSON.
            part_of: which rank's part of what is saved there, if each rank saves by itself.

        Raises:
            BusyError: another save into it is under way.
            InvalidStateError: the directory holds safetensors files of somebody else.
            OSError: it can't be made or locked.
        """
        self.abandon()
        with _lock:
            other = _holders.get(path)
        if other is not None and not other.is_busy():
            other.abandon()
        self._session = _native.Session(path, world_size, config, part_of)
        self.path, self._pid = path, os.getpid()
        with _lock:
            _holders[path] = self

    def commit(self, receipts: list[bytes], state: str, names: list[str]) -> dict[str, object]:
        """Make what the ranks wrote the checkpoint; returns what the native side says of it.

        Raises:
            InvalidStateError: there was no plan, or ranks or parts of tensors are missing.
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
        """Remove what the ranks wrote, if there is a save that did not get to its commit."""
        session = self._let_go()
        if session is None:
            return
        if self._pid != os.getpid():
            _inherited.append(session)  # the parent's: a forked child must not clean it up
        else:
            session.abandon()

    def is_busy(self) -> bool:
        """Tell whether the save may still commit, in another thread than this one."""
        save = self._save()
        return save is not None and save.is_busy()

    def _let_go(self) -> _native.Session | None:
        with _lock:
            session, self._session = self._session, None
            if _holders.get(self.path) is self:
                del _holders[self.path]
        return session


class Holds:
    """The holds of one writer's saves: those that may still be needed, and those that failed."""

    def __init__(self) -> None:
        self._holds: list[Coordinator] = []

    def add(self, hold: Coordinator) -> None:
        """Take a new save's, and abandon those of saves that have ended."""
        for other in list(self._holds):
            if not other.is_busy():
                self._holds.remove(other)
                other.abandon()
        self._holds.append(hold)

    def abandon(self) -> None:
        """Abandon them all."""
        while self._holds:
            self._holds.pop().abandon()


# Re-entrant: the garbage collector may end a writer anywhere.
_lock = threading.RLock()
# By the directory that each holds.
_holders: weakref.WeakValueDictionary[str, Coordinator] = weakref.WeakValueDictionary()
_inherited: list[_native.Session] = []


def _after_fork() -> None:
    """In a forked child: another thread may have had the lock, and holds are the parent's."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
