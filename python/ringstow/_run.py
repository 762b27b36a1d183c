"""The directory of a run: its steps, where the next one goes, and which manager saves there."""

from __future__ import annotations

import gc
import logging
import os
from typing import TYPE_CHECKING

from ringstow import _catalog, _native, _others
from ringstow._damage import OnCorrupt, is_damage
from ringstow._errors import BusyError, InvalidStateError, NoCheckpointError
from ringstow._nearest import warn_of_lost_manifests, was_committed
from ringstow._open import open as open_checkpoint
from ringstow.foreign import _steps

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config

_log = logging.getLogger("ringstow")


class Run:
    """The directory of a run, as the rank sees it that looks."""

    def __init__(self, root: str, config: Config | None) -> None:
        self.root = root
        self._config = config
        self._paths: dict[int, str] | None = None
        self.passed_over: list[Step] = []
        """Newer steps that the last search has not returned, since files of them are lost."""

    def steps(self) -> list[Step]:
        """List the steps, oldest first."""
        return _catalog.steps(self.root, config=self._config)

    def newest(self) -> Step | None:
        """Return the newest step that can be loaded; log those that are newer and cannot."""
        for committed in (self._committed(), self._refuse_other_checkpoints()):
            whole = first_whole(committed)
            if whole is not None:
                return whole
        left = _steps.newest_in(self.root)
        return None if left is None else _step_of(left)

    def loadable(self) -> list[Step]:
        """Return the steps that can be loaded, newest first."""
        return [found for found in self._committed() if found.status == "committed"]

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the steps that were committed, newest first, damaged ones too.

        With ``"previous"`` and a manifest on bad sectors, only the newest one that is intact.
        """
        try:
            found = self._committed() or self._refuse_other_checkpoints()
        except OSError as error:
            if on_corrupt == "raise" or not is_damage(error):
                raise
            return self._intact(error)
        if found:
            self._tell_newer(found[0])
            return found
        left = _steps.newest_in(self.root)
        if left is not None:
            _log.warning(
                "%s holds no step of ringstow's yet: restoring %s, which another program has left "
                "(%s). The next save is ringstow's; that program's checkpoints stay until you "
                "remove them",
                self.root,
                left.path,
                left.kind,
            )
            return [_step_of(left)]
        return found

    def _tell_newer(self, found: Step) -> None:
        """Warn of checkpoints of another program with a higher number, which are passed over."""
        newer = [one for one in _steps.found_in(self.root) if (one.step or 0) > (found.step or 0)]
        if newer:
            _log.warning(
                "%s, which another program has left, has a higher step than %s, and is passed "
                "over: to go on from it, load it with ringstow.load(%r)",
                newer[-1].path,
                found.path,
                newer[-1].path,
            )

    def _intact(self, error: OSError) -> list[Step]:
        """Return the newest step whose every byte is intact, in a list.

        Raises:
            OSError: there is none: the error of the newest.
        """
        path = _catalog.latest(self.root, verify=True, config=self._config)  # logs what it passes
        step = None if path is None else step_at(path, self._config)
        if step is None or step.step is None:
            raise error
        return [step]

    def named(self, step: int) -> list[Step]:
        """Return the step of this number, in a list.

        Raises:
            NoCheckpointError: it was not committed; names those that were.
        """
        steps = self._committed()
        wanted = [found for found in steps if found.step == step]
        if not wanted:
            left = [one for one in _steps.found_in(self.root) if one.step == step]
            if len(left) == 1:
                return [_step_of(left[0])]
            there = ", ".join(str(found.step) for found in reversed(steps)) or "none yet"
            raise NoCheckpointError(
                f"{self.root} has no step {step}; its steps: {there}", path=self.root
            )
        return wanted[:1]

    def path_of(self, step: int) -> str:
        """Return where to save a step: in place of the step of that number, if there was one.

        Raises:
            InvalidStateError: a link is there, or a copy of another step.
        """
        if self._paths is None:
            try:
                self._paths = {s.step: s.path for s in self.steps() if s.step is not None}
            except Exception as error:  # it says nothing about the save, which may go well
                _log.warning("cannot list the steps in %s: %s", self.root, error)
        path = (self._paths or {}).get(step) or usual_path(self.root, step)
        _native.check_own_name(path)
        return path

    def _committed(self) -> list[Step]:
        steps = self.steps()
        warn_of_lost_manifests(steps)
        return [found for found in reversed(steps) if was_committed(found)]

    def _refuse_other_checkpoints(self) -> list[Step]:
        """Raise why nothing can be loaded, unless nothing was committed yet.

        Returns:
            The steps, if another process has committed the first one meanwhile.
        """
        path = _catalog.own_latest(self.root, config=self._config)
        found = [] if path is None else self._committed()
        if path is not None and not found and not _native.has_gone(path):
            raise InvalidStateError(
                f"{path} is a checkpoint, but nothing in {self.root} counts as a step: training "
                "must not begin anew beside it. Load it with ringstow.load, or give the manager "
                "another directory"
            )
        return found


class RunLock:
    """The lock of a run: one manager saves there. Readers and saves without one need none."""

    def __init__(self, root: str) -> None:
        """Name the run."""
        self._root = root
        self._held: _native.RunLock | None = None

    def take(self) -> None:
        """Keep other managers from saving there.

        Raises:
            BusyError: another one does, in this process or in another; says which.
            InvalidStateError: another rank of this job has, and there is no process group.
            OSError: the directory cannot be made, or its lock file not be opened.
        """
        if _native.RunLock.is_own(self._root):
            gc.collect()  # a manager that was dropped without `close` may wait for it
        try:
            self._held = _native.RunLock(self._root)
        except BusyError as error:
            raise _others.explained(error, is_own=False) from None
        try:
            _others.refuse_run_of_other_ranks(self._root)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise BusyError if a manager on another host has taken the run over meanwhile."""
        if self._held is not None:
            self._held.check()

    def release(self) -> None:
        """Let other managers save there."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


def usual_path(root: str, step: int) -> str:
    """Return where a step is saved, unless the run has it under another name."""
    return os.path.join(root, f"step-{step:08}")


def first_whole(steps: list[Step]) -> Step | None:
    """Return the first step that can be loaded; log those before it."""
    for found in steps:
        if found.status == "committed":
            return found
        _log.warning("passing over %s, which cannot be loaded: %s", found.path, found.problem)
    return None


def step_at(path: str, config: Config | None) -> Step:
    """Return the committed checkpoint at a path.

    Raises:
        Error, OSError: it cannot be opened.
    """
    from ringstow._catalog_report import Step

    with open_checkpoint(path, config=config) as checkpoint:
        info = checkpoint.info
    return Step(
        path=path,
        step=info.step,
        metrics=info.metrics,
        dropped=info.dropped,
        created_unix_ms=info.created_unix_ms,
        order=(0, info.step or 0, 0, info.created_unix_ms),
        nbytes=None,
        status="committed",
        problem=None,
    )


def _step_of(left: _steps.Left) -> Step:
    from ringstow._catalog_report import Step

    return Step(
        path=left.path,
        step=left.step,
        metrics={},
        dropped=(),
        created_unix_ms=None,
        order=(0, left.step or 0, 0, 0),
        nbytes=None,
        status="committed",
        problem=None,
    )
