"""The work of a manager besides saves and loads: it copies steps, and removes old ones."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core._config import Config, native_json
from ringstow._core._errors import Error
from ringstow._manager._previous import PreviousSteps
from ringstow._saving._copy_queue import Copier

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringstow._reports._checkpoint_reports import Retained, Step
    from ringstow._saving._save_future import SaveHandle

_log = logging.getLogger("ringstow")


class Upkeep:
    """Copies and removes steps after each save of a manager, and before some."""

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
        """Store the parts.

        Args:
            root: the directory of the run.
            copier: copies steps to tiers and other nodes.
            clearing: decides which steps to remove, and removes them.
            previous: remembers the base of the next save; None if saves have no base.
            from_first: calls a function on the first rank, and returns its result on all ranks.
            leads: whether this process removes steps.
            evicts: whether a step is removed here once all tiers have a copy.
            node_local: whether all ranks copy together; they must then copy the same steps.
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
        """The report of the last removal of old steps; None before the first, or if it failed."""
        self.error: Exception | None = None
        """Why the last removal or slimming failed."""

    def make_room(self) -> None:
        """If the next save does not fit, wait for copies, and remove what they release."""
        if not (self._evicts and self._leads) or self._has_room():
            return
        self._evict()
        if self._has_room() or not self._copier.waiting():
            return
        _log.warning(
            "%s is full: the save waits until earlier steps are copied and removed", self._root
        )
        self._copier.wait()
        self._evict()

    def _has_room(self) -> bool:
        """Return whether a save of the newest step's size fits; True if unknown."""
        try:
            return self._clearing.has_room(_free(self._root))
        except OSError:
            return True

    def _evict(self) -> None:
        """Remove the steps that all tiers have, and copy the steps that a tier lacks."""
        self._copy_found(self._clearing.evict(self._copier.waiting()))

    def _copy_found(self, paths: list[str]) -> None:
        """Copy older steps, unless all ranks copy together: the others do not know these steps."""
        if not self._node_local:
            for path in paths:
                self._copier.add_found(path)

    def committed(self, path: str, copies: Future[bool] | None = None) -> None:
        """Copy a saved step, and remove old ones. ``copies`` receives the outcome of the copy."""
        if self._previous is not None:
            self._previous.saved(path)
        lacking: list[str] = []
        try:
            lacking = self.clear()
        finally:
            # List the tiers first: the copy of this step removes steps there that no rule keeps.
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
            tiers: the directories and URLs to search besides the run.
            config: the settings for reads.
            loadable: lists the steps of the run, newest first.
            drop_newer: whether to remove them.
        """
        here = [self._root] if self._leads else []

        def look(places: list[str]) -> None:
            how = native_json(config)
            _native.go_back(self._root, places, restored.order, drop_newer, how)

        if drop_newer:
            # A copy that has begun continues after the step is removed here, and would restore it
            # there.
            look(here)
            self._copier.wait()
        look([*here, *tiers])
        if drop_newer and self._copier.has_places and not self._node_local:
            # A newer step, which is removed now, may have taken the place of this step's copy.
            for newest in loadable()[:1]:
                self._copier.add_found(newest.path)

    def rescue(self, path: str, copies: Future[bool] | None = None) -> None:
        """Copy a step whose last sync failed: the copy may survive a crash."""
        if not self._node_local:  # the other ranks do not know
            self._copier.rescue(path, copies)

    def follow(self, handle: SaveHandle, path: str) -> threading.Event:
        """Do what `committed` does once a background save has ended; return an event set then."""
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

        def ended(done: Any) -> None:  # does not refer to the handle, so that it can be freed
            how = done._is_committed(), done._may_be_lost()
            if threading.get_ident() != caller:
                clean_up(*how)
                return
            try:  # the save ended before a thread could follow it
                threading.Thread(target=clean_up, args=how).start()
            except RuntimeError:  # there can be no more threads
                clean_up(*how)

        handle.add_done_callback(ended)
        return is_over

    def find_out(self, lacking: list[str], passed_over: Collection[str]) -> None:
        """After a restore, copy the steps here that a tier lacks.

        Nodes may have found different steps, and must copy the same ones: they try to copy all
        steps.

        Args:
            lacking: paths of these steps.
            passed_over: paths of steps that cannot be loaded, and so cannot be copied.
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
        """Remove old steps; return the kept steps that a tier lacks."""
        if not self._leads:
            return []
        self.report, self.error, lacking = cleared(self._clearing, self._copier.waiting())
        return lacking

    def raise_failures(self) -> None:
        """Raise the failure of the last removal or of the last copy, if one failed."""
        errors = [one for one in (self.error, self._copier.error) if one is not None]
        done = self.report
        failed = [] if done is None else [left for left in done.left if left.failed]
        if failed:
            said = "; ".join(f"{left.path}: {left.reason}" for left in failed)
            errors.append(Error(f"not removed: {said}"))
        if len(errors) > 1:
            raise BaseExceptionGroup(
                f"{self._root} is saved, but not tidied and not copied", errors
            )
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for the copies, and remove the steps that they release."""
        self._copier.close()
        if self._leads:
            self._clearing.evict(self._copier.waiting())


def cleared(
    clearing: _native.Clearing, waiting: list[str]
) -> tuple[Retained | None, Exception | None, list[str]]:
    """Remove and slim the steps of a run after a save; a failure here does not fail the save.

    Returns:
        The report of the removal, the failure, and the steps that a tier lacks.
    """
    from ringstow._reports._checkpoint_reports import Retained

    done, failure, lacking = clearing.after_save(waiting)
    return None if done is None else Retained.from_json(done), failure, lacking


def _free(directory: str) -> int:
    """Return how many bytes of its file system this user may still write."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
