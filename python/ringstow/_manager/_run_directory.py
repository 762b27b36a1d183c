"""The directory of a run: its steps, the path of the next step, and the lock of its manager."""

from __future__ import annotations

import gc
import logging
import os
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._config import native_json
from ringstow._core._errors import BusyError, NoCheckpointError
from ringstow._foreign import _steps
from ringstow._ranks import _concurrent_saves
from ringstow._reading import _run_steps
from ringstow._reports._checkpoint_reports import Step

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._core._damage import OnCorrupt

_log = logging.getLogger("ringstow")


class Run:
    """The steps of a run in its directory and on tiers, as this rank sees them."""

    def __init__(self, root: str, config: Config | None, tiers: tuple[str, ...] = ()) -> None:
        self.root = root
        self.tiers = tiers
        self._config = config
        self._found = _native.RunSteps(root, tiers, native_json(config))
        self._paths: dict[int, str] | None = None
        self.passed_over: list[Step] = []
        """Newer steps that the last search skipped, since some of their files are lost."""

    def steps(self) -> list[Step]:
        """List the steps in the directory, oldest first."""
        return _run_steps.steps(self.root, config=self._config)

    def newest(self) -> Step | None:
        """Return the newest step that can be loaded by itself; log newer ones that cannot.

        Raises:
            Error: steps were committed, and none can be loaded; or nothing in the run counts as a
                step.
            OSError: the directory or a tier can't be read.
        """
        return next(iter(listed(self._found.newest()) or self._left()), None)

    def loadable(self) -> list[Step]:
        """Return the steps that can be loaded, newest first; of one step, the nearest copy first.

        Raises:
            OSError: the directory or a tier can't be read.
        """
        return listed(self._found.loadable())

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the committed steps, newest first; of one step, the nearest copy first.

        Includes damaged steps. If nothing was committed, returns another program's checkpoints.

        Raises:
            Error: nothing in the run counts as a step, but something was committed.
            OSError: the directory or a tier can't be read: it may have the newest step.
        """
        found = listed(self._found.candidates(on_corrupt == "previous"))
        if found:
            self._tell_newer(found[0])
            return found
        left = self._left()
        for one in left:
            _log.warning(
                "%s holds no step of ringstow's yet: restoring %s, which another program has left. "
                "The next save is ringstow's; that program's checkpoints stay until you remove "
                "them",
                self.root,
                one.path,
            )
        return left

    def named(self, step: int) -> list[Step]:
        """Return the copies of the step of this number, the nearest first.

        Raises:
            NoCheckpointError: neither the directory nor a tier has it; lists the steps that they
                have.
            OSError: the directory or a tier can't be read.
        """
        try:
            return listed(self._found.named(step))
        except NoCheckpointError:
            left = [one for one in _steps.found_in(self.root) if one.step == step]
            if len(left) != 1:
                raise
            return [Step.of_foreign(left[0].path, left[0].step)]

    def follow(self, found: list[Step]) -> None:
        """Make the next save newer than all steps that were found."""
        for step in found:
            _native.follow(self.root, step.order)

    def lacking(self, found: list[Step]) -> list[str]:
        """Return the paths of the whole steps here that a tier lacks, among the steps found."""
        seen = [(step.path, step.order, step.status == "committed") for step in found]
        return _native.lacking(seen, self.tiers)

    def is_here(self, path: str) -> bool:
        """Return whether a step is in the run's own directory."""
        return not any(path.startswith(f"{tier}/") for tier in self.tiers)

    def tell_empty(self) -> None:
        """Warn that there is nothing to restore: the directory may be mistyped."""
        there = "" if os.path.isdir(self.root) else " (no such directory)"
        tiers = f" and {' and '.join(self.tiers)}" if self.tiers else ""
        _log.warning("nothing in %s%s%s: starting anew", self.root, there, tiers)

    def path_of(self, step: int) -> str:
        """Return the path for saving a step: the path of an existing step of that number, if any.

        Raises:
            InvalidStateError: the path is a link, or a copy of another step.
        """
        if self._paths is None:
            try:
                self._paths = {s.step: s.path for s in self.steps() if s.step is not None}
            except Exception as error:  # the save may still succeed
                _log.warning("cannot list the steps in %s: %s", self.root, error)
        path = (self._paths or {}).get(step) or _native.usual_path(self.root, step)
        _native.check_own_name(path)
        return path

    def _left(self) -> list[Step]:
        """Return a list with the newest checkpoint that another program has left."""
        left = _steps.newest_in(self.root)
        return [] if left is None else [Step.of_foreign(left.path, left.step)]

    def _tell_newer(self, found: Step) -> None:
        """Warn that checkpoints of another program with a higher number are not restored."""
        newer = [one for one in _steps.found_in(self.root) if (one.step or 0) > (found.step or 0)]
        if newer:
            _log.warning(
                "%s, which another program has left, has a higher step than %s, and is passed "
                "over: to go on from it, load it with ringstow.load(%r)",
                newer[-1].path,
                found.path,
                newer[-1].path,
            )


def listed(text: str) -> list[Step]:
    """Return the steps that the native side lists."""
    return Step.list_from_json(text)


class RunLock:
    """The lock of a run: one manager saves there. Readers and `ringstow.save` need no lock."""

    def __init__(self, root: str) -> None:
        """Store the run's path."""
        self._root = root
        self._held: _native.RunLock | None = None

    def take(self) -> None:
        """Lock the run, so that no other manager saves there.

        Raises:
            BusyError: another manager has the lock, in this process or in another; says which.
            InvalidStateError: another rank of this job has the lock, and there is no process group.
            OSError: the directory cannot be made, or its lock file cannot be opened.
        """
        if _native.RunLock.is_own(self._root):
            gc.collect()  # frees the lock of a manager that was dropped without `close`
        try:
            self._held = _native.RunLock(self._root)
        except BusyError as error:
            raise _concurrent_saves.explained(error, is_own=False) from None
        try:
            _concurrent_saves.refuse_run_of_other_ranks(self._root)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise BusyError if a manager on another host has taken the run over meanwhile."""
        if self._held is not None:
            self._held.check()

    def release(self) -> None:
        """Unlock the run for other managers."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
