"""Which saves of this process are under way: one save a writer at a time, one session a directory.

A save that fails while it is planned ends without a word to its writer. So nothing here waits for
one: whether a save still runs is read off the stack of its thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from types import FrameType

from ringstow import _native
from ringstow._errors import InvalidStateError

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_PROCESS = "torch.distributed.checkpoint._async_process_executor"
# The functions of torch within which a thread is busy with a save.
_FUNCTIONS = {(_SAVER, "save"), (_SAVER, "_save_state_dict"), (_PROCESS, "_execute_save_impl")}

_POLL_S = 0.005


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


class Turn:
    """Lets the saves of one writer go one after the other, whatever thread each runs in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None

    def take(self) -> None:
        """Wait until no other thread's save runs; from then on it is this thread's turn."""
        me = threading.current_thread()
        while True:
            with self._lock:
                owner = self._owner
                if owner is None or owner is me or not is_saving(owner):
                    self._owner = me
                    return
            time.sleep(_POLL_S)

    def take_if_saving(self) -> None:
        """Do so in a thread that saves; any other goes on at once."""
        if is_saving(threading.current_thread()):
            self.take()


class Coordinator:
    """The coordinator's hold on a directory, from its plan to the commit; nothing in between saves.

    There is one a writer. It outlives a failed save, whose end nobody tells of, until the same
    writer's next one, or another writer's in this process that wants the directory.
    """

    def __init__(self) -> None:
        self._session: _native.Session | None = None
        self._thread = threading.current_thread()
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
        if other is not None and not other._is_busy():
            other.abandon()
        session = _native.Session(path, world_size, config, part_of)
        self._session, self.path = session, path
        self._thread, self._pid = threading.current_thread(), os.getpid()
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

    def _is_busy(self) -> bool:
        """Tell whether the save is still under way, in another thread than this one."""
        return self._thread is not threading.current_thread() and is_saving(self._thread)

    def _let_go(self) -> _native.Session | None:
        with _lock:
            session, self._session = self._session, None
            if _holders.get(self.path) is self:
                del _holders[self.path]
        return session


# Re-entrant: the garbage collector may end a writer anywhere.
_lock = threading.RLock()
# By the directory that each holds.
_holders: weakref.WeakValueDictionary[str, Coordinator] = weakref.WeakValueDictionary()
_inherited: list[_native.Session] = []
