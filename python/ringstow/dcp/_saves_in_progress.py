"""Saves of this process in progress: one save per writer at a time, one session per directory.

DCP calls all hooks of a save in one thread, so a save belongs to its thread. A save has ended when
its thread or its thread pool's call has ended, or when its thread uses a writer for anything else.
DCP does not tell a writer that a save failed between two hooks, nor that the collectives after the
last hook have ended. So other threads wait until a thread pool's call of DCP's own function, which
makes one save, has ended. In all other cases they wait until the last hook, for at most `_UNSEEN_S`
between two hooks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._reports._blocked_time import Waited
from ringstow.dcp import _private
from ringstow.dcp._stand_ins import Planning
from ringstow.dcp._step_note import Note
from ringstow.dcp._streaming_stager import StagingFuture

if TYPE_CHECKING:
    from ringstow._saving._tier_copies import Promoter

_log = logging.getLogger("ringstow")

_POLL_S = 0.005
_UNSEEN_S = 10.0


class _Here(threading.local):
    save: Save | None = None


# The save that a thread began last, if the thread may still be in it.
_here = _Here()


def end_here() -> None:
    """Note that this thread's save has ended: DCP calls this function outside saves only."""
    if _here.save is not None:
        _here.save.is_over = True
        _here.save.planning.end()  # DCP may have failed before it planned
        _here.save = None


class Save:
    """One save of a writer: its hooks' shared state, and the coordinator's directory lock."""

    def __init__(self, path: str, note: Note) -> None:
        end_here()
        _here.save = self
        self.path = path
        """The directory that this process writes into."""
        self.note = note
        """The step and the metrics for the manifest."""
        self.rank: int | None = None
        self.is_alone = False
        """Whether each rank saves by itself."""
        self.commits = True
        """Whether this rank's last hook is `finish`, not `write_data`."""
        self.part_of: tuple[int, int, str] | None = None
        self.planning = Planning(None)
        """What this rank's planner plans."""
        self.promoter: Promoter | None = None
        """Copies the checkpoint to tiers, once it is committed."""
        self.stream: StagingFuture | None = None
        """The fence of a background save that copies no tensor."""
        self.waited: Waited | None = None
        """How long a background save has blocked training, in seconds; None if unknown."""
        self.is_over = False
        """Whether DCP has left the save, as far as this thread's calls show."""
        self._call = _private.Call()
        self._session: _native.Session | None = None
        self._ranks = 0
        """How many ranks write, on the rank that commits."""
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
        """Note that DCP is within one of the writer's hooks, and whether it calls another.

        If a hook of a save by one rank fails, no other rank is writing, so its files are removed at
        once.
        """
        self._is_in_hook = True
        try:
            yield
        except BaseException as error:
            self._is_done = True
            if self._call.is_save:  # the program may never read DCP's future
                _log.error("the background save to %s failed: %s", self.path, error)
            if self._ranks == 1:
                try:
                    self.abandon()
                except Exception as second:
                    error.add_note(f"what it wrote stays in {self.path}: {second}")
            raise
        finally:
            self._touched = time.monotonic()
            self._is_in_hook = False
        self._is_done = self._is_done or is_last

    def is_running(self) -> bool:
        """Return whether a save of the writer in another thread must wait for this one."""
        if self._has_ended():
            return False
        if self._is_in_hook or self._call.is_save:
            return True
        return not self._is_done and time.monotonic() < self._touched + _UNSEEN_S

    def may_commit(self) -> bool:
        """Return whether the save may still commit, as far as another thread can know."""
        return not (self._is_done or self._has_ended())

    def _has_ended(self) -> bool:
        return self.is_over or self._call.is_here() or self._call.has_ended()

    # The native session locks the directory from the coordinator's plan to the commit. After a
    # failed save by several ranks, or an undetected failure, the lock stays until the next save of
    # the writer, or until another writer of this process saves into the directory. In a forked
    # child it does nothing.

    def lock(self, world_size: int, config: str) -> None:
        """Lock the directory for a save by ``world_size`` ranks, and the stripe directories.

        Args:
            world_size: the number of ranks that write into it.
            config: the configuration, in JSON.

        Raises:
            BusyError: another save into the directory is in progress.
            InvalidStateError: the directory holds another program's safetensors files.
            OSError: the directory can't be made or locked.
        """
        other = _locking.get(self.path)
        if other is not None and not other.may_commit():
            other.abandon()
        self._ranks = world_size
        self._session = _native.Session(
            self.path, world_size, config, self.part_of, self.note.step, self.note.metrics
        )
        _locking[self.path] = self

    def commit(self, receipts: list[bytes], state: str, names: list[str]) -> dict[str, object]:
        """Commit the ranks' files, and return the native side's report.

        Raises:
            InvalidStateError: there was no plan, or ranks or regions of tensors are missing.
            OSError: the system refused.
        """
        if self._session is None:
            raise InvalidStateError(
                "finish() was called without prepare_global_plan() first: save by dcp.save or "
                "dcp.async_save"
            )
        session, merged = self._session, _native.Receipts(receipts)
        done: dict[str, object] = json.loads(session.commit(merged, state, names))
        return done

    def abandon(self) -> None:
        """Unlock the directory and remove the ranks' files, unless they were committed."""
        self.planning.end()
        if self._session is not None:
            self._session.abandon()


# The save that locked each directory last.
_locking: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()


class Saves:
    """The saves of one writer, which run one after the other, in any threads."""

    def __init__(self) -> None:
        self.latest: Save | None = None
        self._open: list[Save] = []
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too

    def begin(self, save: Save) -> None:
        """Wait until no other thread's save runs, and abandon ended saves."""
        while True:
            with self._lock:
                if self.latest is None or not self.latest.is_running():
                    self.latest = save
                    break
            time.sleep(_POLL_S)
        for other in list(self._open):
            if not other.may_commit():
                self._open.remove(other)
                other.abandon()
        self._open.append(save)

    def abandon(self) -> None:
        """Abandon all saves."""
        while self._open:
            self._open.pop().abandon()
