"""What a manager does to a run besides saves and loads: it copies steps, and removes old ones."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._config import Config, native_json
from ringstow._copier import Copier
from ringstow._eviction import Eviction
from ringstow._previous import Previous
from ringstow._rules import Retention

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringstow._catalog_report import Step
    from ringstow._save_future import SaveFuture

_log = logging.getLogger("ringstow")


class Upkeep:
    """What follows each save of a manager, and precedes some."""

    def __init__(
        self,
        root: str,
        copier: Copier,
        retention: Retention,
        eviction: Eviction | None,
        previous: Previous | None,
        from_first: Callable[[Callable[[], list[str]]], list[str]],
        *,
        leads: bool,
        node_local: bool,
    ) -> None:
        """Name the parts.

        Args:
            root: the directory of the run.
            copier: copies steps.
            retention: removes the steps that no rule keeps.
            eviction: removes those that all tiers have, if there are rules for that.
            previous: remembers the base of the next save, if saves have one.
            from_first: has all ranks get what the first one returns.
            leads: whether this process removes steps.
            node_local: whether all ranks copy together, and so must copy the same steps.
        """
        self._root = root
        self._copier = copier
        self._retention = retention
        self._eviction = eviction
        self._previous = previous
        self._from_first = from_first
        self._leads = leads
        self._node_local = node_local

    def make_room(self) -> None:
        """Before a save, wait for copies if the disk is full and they let steps go."""
        if self._eviction is not None and self._leads:
            self._eviction.make_room(self._evict, self._wait)

    def _wait(self) -> bool:
        """Wait for copies; return False if no step waits for one."""
        if not self._copier.waiting():
            return False
        _log.warning(
            "%s is full: the save waits until earlier steps are on the tiers and leave", self._root
        )
        self._copier.wait()
        return True

    def _evict(self) -> None:
        """Remove the steps that all tiers have, and have those copied that a tier lacks."""
        if self._eviction is not None:
            self._copy_found(self._eviction.run(self._copier.waiting()))

    def _copy_found(self, paths: list[str]) -> None:
        """Have older steps copied, unless other ranks must do so, too, and do not know them."""
        if not self._node_local:
            for path in paths:
                self._await(path)

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

    def follow(self, handle: SaveFuture, path: str) -> threading.Event:
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
        if self._eviction is None:
            return
        self._eviction.damaged.update(passed_over)
        if self._node_local:
            names = self._from_first(self._eviction.names)
            lacking = [os.path.join(self._root, name) for name in names]
        for path in lacking:
            if path not in self._eviction.damaged:
                self._await(path)

    def _await(self, path: str) -> None:
        """Have a step copied, however many newer ones wait."""
        if self._eviction is not None:
            self._eviction.awaited.add(path)
            self._copier.add_found(path)

    def clear(self) -> list[str]:
        """Remove old steps; return those that a rule keeps and that a tier lacks."""
        if not self._leads:
            return []
        self._retention.run(self._is_awaited)
        return [] if self._eviction is None else self._eviction.run(self._copier.waiting())

    def _is_awaited(self, path: str) -> bool:
        """Whether a step is to stay whole here, since a tier lacks it yet."""
        if self._copier.has(path):
            return True
        return self._eviction is not None and not self._eviction.is_everywhere(path)

    def close(self) -> None:
        """Wait for the copies, and remove what they allow."""
        self._copier.close()
        if self._eviction is not None and self._leads:
            self._eviction.run(self._copier.waiting())
