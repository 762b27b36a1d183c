"""What follows a commit on nodes that share no directory: copies on other nodes and in stores."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _promote, _rules
from ringstow._config import native_json
from ringstow._errors import Error
from ringstow.distributed._replicas import replicate

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._report import PromotionReport
    from ringstow._tiers import Plan
    from ringstow.distributed._group import Group

_log = logging.getLogger("ringstow")

COPYING = ".ringstow-copying"
"""A link in a node's directory: `retain` keeps the step that it leads to."""
COPIED = ".ringstow-copied"
"""Likewise, to the newest step that has all its copies."""


class _Added(NamedTuple):
    path: str
    is_new: bool
    """Whether it was just saved, and not restored."""


class AfterCommit:
    """Copies steps in a thread of each rank, the newest first, in the same order on all ranks.

    A step that a newer one overtakes before its copy has begun is passed over. Until a newer step
    has all its copies, no rule removes the last one that had.
    """

    def __init__(
        self,
        group: Group,
        root: str,
        copies: int,
        plan: Plan,
        config: Config | None,
        *,
        leads: bool,
    ) -> None:
        self._group = group
        self._root = root
        self._copies = copies
        self._plan = plan
        self._config = config
        self._leads = leads
        """Whether this rank acts for its node."""
        self._changed = threading.Condition()
        self._added: list[_Added] = []
        self._done = 0
        """How many of those added are copied, or passed over."""
        self._is_running = False
        self._is_broken = False
        self.report: PromotionReport | None = None
        """What this node has sent to a store last."""
        self.error: BaseException | None = None
        """Why the last copy failed; None after one that went well."""
        self._unlink(COPYING)
        if copies == 1:
            self._unlink(COPIED)

    def add(self, path: str, *, is_new: bool) -> None:
        """Copy a step as soon as the copy in progress has ended. All ranks add the same."""
        if self._copies == 1 and not self._plan.tiers:
            return
        with self._changed:
            if self._is_broken:
                _log.error("%s is saved, but not copied: the ranks have lost each other", path)
                return
            self._added.append(_Added(path, is_new))
            if self._is_running:
                return
            try:
                # The exit waits for it: the other ranks do the same copies.
                threading.Thread(target=self._work, name="ringstow-copies", daemon=False).start()
            except RuntimeError as error:  # there can be no more threads
                self._is_broken, self.error = True, error
                _log.error("%s is saved, but not copied: %s", path, error)
            else:
                self._is_running = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to copy; return whether that is so, and the last copy good."""
        with self._changed:
            is_over = self._changed.wait_for(lambda: not self._is_running, timeout)
            return is_over and self.error is None

    def _work(self) -> None:
        while True:
            with self._changed:
                added = len(self._added)
                if added == self._done or self._is_broken:
                    self._is_running = False
                    self._changed.notify_all()
                    return
            try:
                # Each rank copies the newest that all have added: so all of them copy the same.
                newest = min(self._group.gathered(added))
                step = self._next(newest)
            except BaseException as error:
                self._break(error)
                continue
            self.error = None
            self._copy(step)

    def _next(self, newest: int) -> _Added:
        step = self._added[newest - 1]
        for passed in self._added[self._done : newest - 1]:
            _log.warning(
                "%s is not copied: %s is newer, and the copies are slower than the saves",
                passed.path,
                step.path,
            )
        self._done = newest
        return step

    def _break(self, error: BaseException) -> None:
        """End all copies: who has lost a rank can no longer agree with the others."""
        self._is_broken = True
        self.error = error
        path = self._added[-1].path
        _log.error("%s is saved, but neither it nor later steps are copied: %s", path, error)

    def _copy(self, step: _Added) -> None:
        """Copy a step to other nodes and to stores. A failure of one is none of the others."""
        self._link(COPYING, step.path)
        if self._copies > 1 and self._is_done(step, "other nodes", self._to_nodes):
            self._link(COPIED, step.path)
        for tier in self._plan.tiers:
            to_store = functools.partial(self._to_store, tier)
            if self._is_done(step, tier, to_store) and step.is_new:
                self._clear(tier)
        self._unlink(COPYING)

    def _is_done(self, step: _Added, where: str, copy: Callable[[_Added], bool]) -> bool:
        """Copy a step to one place; return whether it is there."""
        if self._is_broken:
            return False
        try:
            return copy(step)
        except (Error, OSError) as error:  # on all ranks
            self.error = error
            _log.error("%s is saved, but not copied to %s: %s", step.path, where, error)
        except BaseException as error:  # lost connections, or a panic: training goes on
            self._break(error)
        return False

    def _to_nodes(self, step: _Added) -> bool:
        return replicate(self._group, step.path, self._copies, native_json(self._config))

    def _to_store(self, tier: str, step: _Added) -> bool:
        """Have each node send its files; the last one commits.

        Raises:
            Error: a node could not send its files.
        """
        url = f"{tier}/{os.path.basename(step.path)}"
        all_missing = self._sent(step, url, self._leads)
        if 0 not in all_missing:  # all looked before the last one had sent its own
            all_missing = self._sent(step, url, self._group.is_first)
        if 0 not in all_missing:
            raise Error(f"{url} is not committed: files that were sent to it are gone")
        return True

    def _sent(self, step: _Added, url: str, sends: bool) -> list[int]:
        """Return how many files each rank that sends has found missing then; -1 for the others."""
        missing = -1
        failure: Error | None = None
        try:
            if sends:
                self.report = _promote.promote(
                    step.path,
                    url,
                    rate=self._plan.rate,
                    replace_older=True,  # a run that went back saves a step again
                    replicas=not step.is_new,  # each node is there and sends its own
                    config=self._config,
                )
                missing = self.report.missing
        except Exception as error:  # the other ranks must not wait for this one
            failure = Error(f"{type(error).__name__}: {error}")
        return self._group.agreed(failure, missing)

    def _clear(self, tier: str) -> None:
        """Remove old steps from a store."""
        if not self._group.is_first or self._plan.rules.keeps_all:
            return
        try:
            _rules.retain(tier, self._plan.rules, self._config)
        except Exception as error:
            self.error = error
            _log.error("old steps stay in %s: %s", tier, error)

    def _link(self, name: str, path: str) -> None:
        """Have a link in this node's directory lead to a step."""
        if self._leads:
            part = os.path.join(self._root, f"{name}.part")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            with contextlib.suppress(OSError):  # then the step has one protection less
                os.symlink(os.path.basename(path), part)
                os.replace(part, os.path.join(self._root, name))

    def _unlink(self, name: str) -> None:
        if self._leads:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._root, name))
