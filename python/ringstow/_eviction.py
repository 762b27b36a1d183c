"""Steps leave a manager's directory once all of its tiers have them.

Which steps those are is decided by the native side, which asks each tier right before it removes a
step. What is noted here never decides on a removal.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringstow import _catalog, _native
from ringstow._errors import Error
from ringstow._rules import positive

if TYPE_CHECKING:
    from ringstow._catalog_report import Evicted, Step
    from ringstow._config import Config
    from ringstow._rules import Rules

_log = logging.getLogger("ringstow")


class Eviction:
    """Removes all but the newest steps, each once every tier has it whole."""

    def __init__(self, root: str, tiers: tuple[str, ...], keep: int, config: Config | None) -> None:
        self._root = root
        self._tiers = tiers
        self._keep = keep
        """How many of the newest steps stay in any case."""
        self._config = config
        self.awaited: set[str] = set()
        """Steps that must get to the tiers, however many newer ones wait."""
        self.damaged: set[str] = set()
        """Steps that cannot be copied: another try would read their bytes again."""

    def is_everywhere(self, path: str) -> bool:
        """Return whether all tiers have a step whole at this moment."""
        return _native.is_everywhere(path, self._tiers)

    def names(self) -> list[str]:
        """Return the names of the steps here that can be copied.

        Raises:
            OSError: the directory cannot be read.
        """
        paths = [step.path for step in self._committed() if step.path not in self.damaged]
        return [os.path.basename(path) for path in paths]

    def make_room(self, run: Callable[[], object], wait: Callable[[], bool]) -> None:
        """Before a save for which there is no room, wait for copies, and remove what they allow.

        A save of the size of the newest step is expected.

        Args:
            run: removes steps, and has those copied that a tier lacks.
            wait: waits for the copies in progress; returns False if there are none.
        """
        try:
            committed = self._committed()
            needed = committed[-1].nbytes if committed else None
            if self._has_room(needed):
                return
            run()
            if self._has_room(needed):
                return
        except (Error, OSError):
            return  # the save will say so
        if wait():
            run()

    def run(self, waiting: list[str]) -> list[str]:
        """Remove steps; log a failure, and never raise one: the save went well.

        Only while this manager saves nothing: a step may be saved again.

        Args:
            waiting: paths of steps that are to be copied yet: they stay.

        Returns:
            Older steps that a tier lacks, which are to be copied.
        """
        try:
            done = _catalog.evict(self._root, self._tiers, self._keep, waiting, self._config)
        except (Error, OSError) as error:
            _log.error("steps stay in %s, though all tiers may have them: %s", self._root, error)
            return []
        self.damaged = {path for path in self.damaged if os.path.lexists(path)}
        lacking = self._tell(done)
        self.awaited = self.awaited.intersection(waiting).union(lacking)
        return lacking

    def _tell(self, done: Evicted) -> list[str]:
        """Log what was done; return the steps that a tier lacks."""
        for left in done.left:
            _log.warning("%s was not removed: %s", left.path, left.reason)
        stay = [step for step in done.stay if step.path not in self.damaged]
        for reason, step in {step.reason: step for step in reversed(stay)}.items():
            again = ". It leaves once it is copied there" if step.is_lacking else ""
            _log.warning("%s stays: %s%s", step.path, reason, again)
        return [step.path for step in stay if step.is_lacking]

    def _has_room(self, needed: int | None) -> bool:
        return _free(self._root) >= (needed or 0)

    def _committed(self) -> list[Step]:
        """Return the steps that can be loaded, oldest first."""
        found = _catalog.steps(self._root, config=self._config)
        return [step for step in found if step.status == "committed"]


def checked(
    keep: int | None,
    root: str,
    tiers: tuple[str, ...],
    here: Rules,
    there: Rules,
    config: Config | None,
) -> Eviction | None:
    """Return what ``keep_here`` asks for; None if it is not given.

    Raises:
        TypeError, ValueError: it is no number of steps.
        InvalidStateError: ``keep_promoted`` removes from the tiers what is to be kept.
    """
    if keep is None:
        return None
    eviction = Eviction(root, tiers, positive(keep, "keep_here"), config)
    if there.keep_last is not None:
        others = {"keep_here": keep, "keep_last": here.keep_last}
        given = [(name, count) for name, count in others.items() if count is not None]
        _native.check_covers(("keep_promoted", there.keep_last), given)
    return eviction


def _free(directory: str) -> int:
    """Return how many bytes its file system has for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
