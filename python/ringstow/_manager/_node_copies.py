"""Copies after a commit on nodes that share no directory: to other nodes and to stores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._config import native_json
from ringstow._core._errors import Error
from ringstow._saving import _promote
from ringstow._saving._copy_queue import Added, Copier, passes
from ringstow.distributed._node_replicas import replicate

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._manager._tiers import Plan
    from ringstow._ranks._group import Group

_log = logging.getLogger("ringstow")

COPYING = ".ringstow-copying"
"""A link in a node's directory: `retain` keeps its target, the step being copied."""
COPIED = ".ringstow-copied"
"""A link in a node's directory to the newest step that has all its copies."""


class AfterCommit(Copier):
    """Copies steps in the same order on all ranks, which all add the same steps.

    No rule removes the last step with all copies until a newer step has all its copies.
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
        super().__init__([*(["other nodes"] if copies > 1 else []), *plan.tiers], plan.stays())
        self._group = group
        self._root = root
        self._copies = copies
        self._plan = plan
        self._config = config
        how = plan.tiers, plan.rate, plan.there.rules, native_json(config)
        self._copying = _native.Copying(root, *how)
        self._leads = leads
        """Whether this rank acts for its node."""
        self._is_broken = False
        """Whether this rank has lost the others, and can no longer agree on what to copy."""
        self._is_temporary = False
        """Whether the copy that just failed on some rank may succeed later."""
        self._unlink(COPYING)
        if copies == 1:
            self._unlink(COPIED)

    def add(
        self,
        path: str,
        *,
        is_new: bool,
        ended: concurrent.futures.Future[bool] | None = None,
    ) -> None:
        """Copy a step as soon as the copy in progress has ended."""
        if self._is_broken:
            problem = f"{path} is saved, but not copied: the ranks have lost each other"
            _log.error("%s", problem)
            if ended is not None:
                ended.set_exception(Error(problem))
            return
        super().add(path, is_new=is_new, ended=ended)

    def _agree(self, added: int, is_closing: bool) -> tuple[int, bool]:
        """Return how many steps all ranks have added, and whether any of them is closing."""
        answers = self._group.gathered((added, is_closing))
        return min(number for number, _ in answers), any(closes for _, closes in answers)

    # All ranks decide alike whether to try again: they copy together.

    def _may_repeat(self) -> bool:
        return self._is_temporary

    def _is_left(self, step: Added) -> bool:
        return True  # `_copy` checks on all ranks

    def _give_up(self, error: BaseException) -> None:
        self._is_broken = True
        super()._give_up(error)

    def _copy(self, step: Added) -> bool:
        """Copy a step to other nodes and to stores. If one copy fails, the others continue."""
        self._is_temporary = False
        self._link(COPYING, step.path)
        if any(self._group.gathered(not os.path.lexists(step.path))):
            # A newer save on another rank has removed this step before all ranks added the newer
            # one.
            self._pass_over(step.path)
            return False
        if self._copies > 1 and self._is_done(step, "other nodes", self._to_nodes):
            self._link(COPIED, step.path)
        for tier in self._plan.tiers:
            to_store = functools.partial(self._to_store, tier)
            is_done = self._is_done(step, tier, to_store)
            self._tell(step, tier, is_done=is_done)
            if is_done and step.is_new:
                self._clear(tier)
        self._unlink(COPYING)
        return True

    def _is_done(self, step: Added, where: str, copy: Callable[[Added], None]) -> bool:
        """Copy a step to one place; return whether the copy exists."""
        if self._is_broken:
            return False
        try:
            try:
                copy(step)
                return True
            except (Error, OSError) as error:  # on all ranks
                self.error = failure = error
            self._is_temporary |= any(self._group.gathered(passes(failure)))
        except BaseException as error:  # lost connections, or a panic: training continues
            self._give_up(error)
            return False
        pause_s = self.pause_s()
        again = "" if pause_s is None else f". It is tried again in {pause_s:.0f} s"
        _log.error("%s is saved, but not copied to %s: %s%s", step.path, where, failure, again)
        return False

    def _tell(self, step: Added, tier: str, *, is_done: bool) -> None:
        """Report the outcome of all nodes' copy to the callbacks, on each node's first rank."""
        if not self._leads:
            return
        if is_done and self.report is not None:
            _promote.tell(self.report)
        elif self.error is not None:
            to = f"{tier}/{os.path.basename(step.path)}"
            _promote.tell_failure(step.path, to, self.error)

    def _to_nodes(self, step: Added) -> None:
        replicate(self._group, step.path, self._copies, native_json(self._config))

    def _to_store(self, tier: str, step: Added) -> None:
        """Have each node send its files; the last one commits.

        Raises:
            Error: a node could not send its files.
        """
        self._claim(tier)
        url = f"{tier}/{os.path.basename(step.path)}"
        all_missing = self._sent(step, url, self._leads)
        if 0 not in all_missing:  # all ranks checked before the last one had sent its files
            all_missing = self._sent(step, url, self._group.is_first)
        if 0 not in all_missing:
            raise Error(f"{url} is not committed: files that were sent to it are gone")

    def _claim(self, tier: str) -> None:
        """Note that a tier has the steps of this run, which has the same name on each node.

        Raises:
            InvalidStateError: the tier has the steps of another run.
        """
        runs = self._group.together(lambda: _native.run_of(self._root) if self._leads else None)
        known = next((run for run in runs if run is not None), None)

        def claim() -> str:
            if _native.run_of(self._root) is None:
                _native.claim(self._root, known)
            return _native.claim_for(self._root, self._plan.tiers, tier)

        run = self._group.from_rank(0, claim)

        def agrees() -> bool:
            if not self._leads:
                return True
            if _native.run_of(self._root) != run:  # all nodes train the run that rank 0 does
                _native.name_run(self._root, run)
            return _native.run_of(tier) == run

        if not all(self._group.together(agrees)):
            raise Error(f"the nodes do not see one directory at {tier}: each has its own")

    def _sent(self, step: Added, url: str, sends: bool) -> list[int]:
        """Return how many files each sending rank has then found missing; -1 for other ranks."""

        def send() -> int:
            if not sends:
                return -1
            how = _promote.How(
                rate=self._plan.rate,
                replace_older=True,  # a run that went back saves a step again
                refuse_link=True,
                replicas=not step.is_new,  # every node is present and sends its own files
            )
            try:
                self.report = _promote.sent(step.path, url, how=how, config=self._config)
            except (Error, OSError):
                raise
            except Exception as error:  # so that no other rank takes it for a lost connection
                raise Error(f"{type(error).__name__}: {error}") from error
            return self.report.missing

        return self._group.together(send)

    def _clear(self, tier: str) -> None:
        """Remove old steps from a store."""
        if self._group.is_first:
            self._copying.clear(tier)

    def _link(self, name: str, path: str) -> None:
        """Make a link in this node's directory point to a step."""
        if self._leads:
            part = os.path.join(self._root, f"{name}.part")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            with contextlib.suppress(OSError):  # without the link, the step is only less protected
                os.symlink(os.path.basename(path), part)
                os.replace(part, os.path.join(self._root, name))

    def _unlink(self, name: str) -> None:
        if self._leads:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._root, name))
