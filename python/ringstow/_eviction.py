"""Steps leave a manager's directory once all of its tiers have them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringstow import _catalog
from ringstow._errors import Error
from ringstow._rules import positive

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config

_log = logging.getLogger("ringstow")


class Eviction:
    """Removes all but the newest steps, each once every tier has it whole."""

    def __init__(self, root: str, keep: int, config: Config | None) -> None:
        self._root = root
        self._keep = keep
        """How many of the newest steps stay in any case."""
        self._config = config
        self._copied: set[tuple[str, int | None]] = set()
        """The saves that are on all tiers: the path and the time of each."""
        self.awaited: set[str] = set()
        """Steps that must get to the tiers, or are there already, as their copy will find out."""
        self.damaged: set[str] = set()
        """Steps that cannot be copied: another try would read their bytes again."""
        self._newest_bytes: int | None = None
        """Bytes of the newest step; None before the first look."""

    def note(self, path: str, created_unix_ms: int | None) -> None:
        """Note that a save is on all tiers. Any thread may call it."""
        self._copied.add((path, created_unix_ms))
        self.awaited.discard(path)

    def unknown(self) -> list[str]:
        """Return the names of steps that this process has not seen on all tiers.

        Raises:
            OSError: the directory cannot be read.
        """
        unknown = [step for step in self._committed() if self._save(step) not in self._copied]
        paths = [step.path for step in unknown if step.path not in self.damaged]
        return [os.path.basename(path) for path in paths]

    def make_room(self, wait: Callable[[], object]) -> None:
        """Before a save for which there is no room, wait for copies, and remove what they allow.

        A save of the size of the newest step is expected.

        Args:
            wait: waits for the copies in progress.
        """
        try:
            if self._newest_bytes is None:
                self._committed()
            if self._has_room():
                return
            self.run()
            if self._has_room() or not self.unknown():
                return
        except (Error, OSError):
            return  # the save will say so
        _log.warning(
            "%s is full: the save waits until earlier steps are on the tiers and leave", self._root
        )
        wait()
        self.run()

    def run(self) -> list[str]:
        """Remove steps; log a failure, and never raise one: the save went well.

        Only while this manager saves nothing: a step may be saved again.

        Returns:
            Older steps that a rule keeps and that a tier may lack, since a newer one overtook them.
        """
        try:
            older = self._older()
            gone = [step for step in older if self._save(step) in self._copied]
            linked = self._linked() if gone else set()
        except (Error, OSError) as error:
            _log.error("steps stay in %s, though all tiers have them: %s", self._root, error)
            return []
        for step in gone:
            if os.path.realpath(step.path) not in linked:
                self._remove(step)
        for save in list(self._copied):
            if not os.path.lexists(save[0]):
                self._copied.discard(save)
        left = [step.path for step in older if step not in gone]
        return [path for path in left if path not in self.damaged]

    def _has_room(self) -> bool:
        return _free(self._root) >= (self._newest_bytes or 0)

    def _remove(self, step: Step) -> None:
        try:
            removed = _catalog.remove(step.path, config=self._config)
        except (Error, OSError) as error:
            _log.warning("%s was not removed: %s. The next save tries again", step.path, error)
            return
        for left in removed.left:
            _log.warning("%s was not removed: %s", left.path, left.reason)
        _log.info("%s has left %s: all tiers have it", os.path.basename(step.path), self._root)

    def _older(self) -> list[Step]:
        """Return the committed steps but for the newest, and for the last saves.

        They differ after the run went back to an earlier step.
        """
        committed = self._committed()
        last_saves = sorted(committed, key=lambda step: step.created_unix_ms or 0)[-self._keep :]
        return [step for step in committed[: -self._keep] if step not in last_saves]

    def _committed(self) -> list[Step]:
        """Return the steps that can be loaded, oldest first."""
        found = _catalog.steps(self._root, config=self._config)
        committed = [step for step in found if step.status == "committed"]
        self._newest_bytes = committed[-1].nbytes if committed else 0
        return committed

    def _linked(self) -> set[str]:
        """Return what links in the directory lead to: it stays, as with `retain`."""
        with os.scandir(self._root) as entries:
            return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}

    @staticmethod
    def _save(step: Step) -> tuple[str, int | None]:
        return step.path, step.created_unix_ms


def checked(keep: int | None, root: str, config: Config | None) -> Eviction | None:
    """Return what ``keep_here`` asks for; None if it is not given.

    Raises:
        TypeError, ValueError: it is no number of steps.
    """
    return None if keep is None else Eviction(root, positive(keep, "keep_here"), config)


def _free(directory: str) -> int:
    """Return how many bytes its file system has for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
