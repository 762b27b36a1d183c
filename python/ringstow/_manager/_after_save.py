"""What a manager does to a run besides saves and loads: it copies steps, and removes old ones."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core._config import Config, native_json
from ringstow._manager._previous import PreviousSteps
from ringstow._saving._copy_queue import Copier

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringstow._reports._checkpoint_reports import Retained, Step
    from ringstow._saving._save_future import SaveHandle

_log = logging.getLogger("ringstow")


class Upkeep:
    """What follows each save of a manager, and precedes some."""

    def __init__(
        self,
        root: str,
        copier: Copier,
        clearing: _native.Clearing,
        previous: PreviousSteps | None,
        from_first: Callable[[Callable[[], list[str]]], list[str]],
        *,
        leads: bool,
        evicts: bool,
        node_local: bool,
    ) -> None:
        """Name the parts.

        Args:
            root: the directory of the run.
            copier: copies steps.
            clearing: removes steps, and decides which.
            previous: remembers the base of the next save, if saves have one.
            from_first: has all ranks get what the first one returns.
            leads: whether this process removes steps.
            evicts: whether steps leave once all tiers have them.
            node_local: whether all ranks copy together, and so must copy the same steps.
        """
        self._root = root
        self._copier = copier
        self._clearing = clearing
        self._previous = previous
        self._from_first = from_first
        self._leads = leads
        self._evicts = evicts
        self._node_local = node_local
        self.report: Retained | None = None
        """What the last removal of old steps did; None before the first, or if it failed."""
        self.error: Exception | None = None
        """Why the last removal or slimming failed."""

    def make_room(self) -> None:
        """Before a save for which there is no room, wait for copies, and remove what they allow."""
        if not (self._evicts and self._leads) or self._has_room():
            return
        self._evict()
        if self._has_room() or not self._copier.waiting():
            return
        _log.warning(
            "%s is full: the save waits until earlier steps are on the tiers and leave", self._root
        )
        self._copier.wait()
        self._evict()

    def _has_room(self) -> bool:
        """Whether a save of the size of the newest step fits; without an answer, it will say so."""
        try:
            return self._clearing.has_room(_free(self._root))
        except OSError:
            return True

    def _evict(self) -> None:
        """Remove the steps that all tiers have, and have those copied that a tier lacks."""
        self._copy_found(self._clearing.evict(self._copier.waiting()))

    def _copy_found(self, paths: list[str]) -> None:
        """Have older steps copied, unless other ranks must do so, too, and do not know them."""
        if not self._node_local:
            for path in paths:
                self._copier.add_found(path)

    def committed(self, path: str, copies: Future[bool] | None = None) -> None:
        """Copy a step that was saved, and remove old ones. ``copies`` becomes how the copy ends."""
        if self._previous is not None:
            self._previous.saved(path)
        lacking: list[str] = []
        try:
            lacking = self.clear()
        finally:
            # After the look at the tiers: the copy of this step removes there what their rules no
            # longer keep.
            self._copier.add(path, is_new=True, ended=copies)
        self._copy_found(lacking)

    def go_back(
        self,
        restored: Step,
        tiers: Sequence[str],
        config: Config | None,
        loadable: Callable[[], list[Step]],
        *,
        drop_newer: bool,
    ) -> None:
        """Warn of the steps that are newer than the restored one, or remove them.

        Args:
            restored: the step.
            tiers: where to look besides the run.
            config: the settings of reading.
            loadable: lists the steps of the run, newest first.
            drop_newer: whether to remove them.
        """
        here = [self._root] if self._leads else []

        def look(places: list[str]) -> None:
            how = native_json(config)
            _native.go_back(self._root, places, restored.order, drop_newer, how)

        if drop_newer:
            # Copies that have begun go on without the step here, and would bring it back there.
            look(here)
            self._copier.wait()
        look([*here, *tiers])
        if drop_newer and not self._node_local:
            # Its copy may have given way to that of a step that is gone.
            for newest in loadable()[:1]:
                self._copier.add_found(newest.path)

    def rescue(self, path: str, copies: Future[bool] | None = None) -> None:
        """Copy a step whose last sync failed: the tiers may keep it."""
        if not self._node_local:  # the other ranks do not know
            self._copier.rescue(path, copies)

    def follow(self, handle: SaveHandle, path: str) -> threading.Event:
        """Do the same once a background save has ended; return what is set after that."""
        is_over = threading.Event()
        copies = self._copier.expected()
        handle._copies = copies

        def clean_up(is_committed: bool, may_be_lost: bool) -> None:
            try:
                if is_committed:
                    self.committed(path, copies)
                if may_be_lost:
                    self.rescue(path, copies)
            finally:
                is_over.set()

        caller = threading.get_ident()

        def ended(done: Any) -> None:  # knows no handle, so that a handle can be dropped
            how = done._is_committed(), done._may_be_lost()
            if threading.get_ident() != caller:
                clean_up(*how)
                return
            try:  # the save has ended before anybody could follow it
                threading.Thread(target=clean_up, args=how).start()
            except RuntimeError:  # there can be no more threads
                clean_up(*how)

        handle.add_done_callback(ended)
        return is_over

    def find_out(self, lacking: list[str], passed_over: Collection[str]) -> None:
        """After a restore, have the steps here copied that a tier lacks.

        Nodes have not all seen the same, and must copy the same: they try to copy all steps.

        Args:
            lacking: paths of these steps.
            passed_over: paths of steps that cannot be loaded, and so not be copied.
        """
        if not self._evicts:
            return
        for path in passed_over:
            self._clearing.note_damage(path)
        if self._node_local:
            names = self._from_first(lambda: list(map(os.path.basename, self._clearing.copyable())))
            lacking = [os.path.join(self._root, name) for name in names]
        for path in lacking:
            if not self._clearing.is_damaged(path):
                self._copier.add_found(path)

    def clear(self) -> list[str]:
        """Remove old steps; return those that a rule keeps and that a tier lacks."""
        if not self._leads:
            return []
        self.report, self.error, lacking = cleared(self._clearing, self._copier.waiting())
        return lacking

    def close(self) -> None:
        """Wait for the copies, and remove what they allow."""
        self._copier.close()
        if self._leads:
            self._clearing.evict(self._copier.waiting())


def cleared(
    clearing: _native.Clearing, waiting: list[str]
) -> tuple[Retained | None, Exception | None, list[str]]:
    """Remove and slim the steps of a run after a save, which no failure of that fails.

    Returns:
        What was removed, what failed, and the steps that a tier lacks.
    """
    from ringstow._reports._checkpoint_reports import Retained

    done, failure, lacking = clearing.after_save(waiting)
    return None if done is None else Retained.from_json(done), failure, lacking


def _free(directory: str) -> int:
    """Return how many bytes its file system has for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
