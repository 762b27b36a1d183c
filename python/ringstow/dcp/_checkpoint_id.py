"""The path of a writer's saves: the path it was made with, or each save's ``checkpoint_id``."""

from __future__ import annotations

import threading
from typing import Any

from ringstow._core._errors import InvalidStateError


class Given:
    """A path that is valid for one save."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_used = False


class _Here(threading.local):
    """The path that one thread gave, and the path of its last save."""

    given: Given | None = None
    saved: str | None = None


class Destination:
    """The paths of one writer's saves.

    A path given for a save is valid for that save only. Otherwise a writer that is kept over many
    steps would replace the previous step with a save without a path. A path is valid in the thread
    that gave it: another thread gets it by `hand_over`, with the state to save.
    """

    def __init__(self, path: str | None, *, keeps_id: bool = False) -> None:
        """Store the writer's own path.

        Args:
            path: the path of saves without a path of their own; None if each save must give one.
            keeps_id: whether a save without a path uses the previous save's path, as torch's writer
                does.
        """
        self._path = path
        self._keeps_id = keeps_id
        self._saved: str | None = None
        self._here = _Here()
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too

    def __getstate__(self) -> dict[str, Any]:
        # Pickle a given path too, and use it up here: its save runs in another process.
        given = self._use()
        return {
            "path": self._path,
            "keeps_id": self._keeps_id,
            "saved": self._saved if given is None else None,
            "given": given,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], keeps_id=state["keeps_id"])  # type: ignore[misc]
        self._saved = state["saved"]
        if state["given"] is not None:
            self.give(state["given"])

    def give(self, path: str) -> None:
        """Set the path of this thread's next save."""
        self._here.given = Given(path)

    def hand_over(self) -> Given | None:
        """Return this thread's path for its next save, for the thread that makes that save."""
        given = self._here.given
        return None if given is None or given.is_used else given

    def receive(self, given: Given | None) -> None:
        """Set the path that another thread hands over, unless this thread was given its own."""
        if self.hand_over() is None:
            self._here.given = given

    def take(self) -> str:
        """Return the path of the save that begins in this thread.

        Raises:
            InvalidStateError: the save has no path, or only a path that an earlier save used up.
        """
        path = self._here.saved = self._use() or self._without()
        return path

    def _use(self) -> str | None:
        """Use up this thread's path for its next save, if it has one."""
        with self._lock:  # another thread may hold the same path
            given = self.hand_over()
            if given is None:
                return None
            given.is_used, self._saved = True, given.path
            return given.path

    def path(self) -> str | None:
        """Return the path of this thread's current or next save; None if none was given yet."""
        given = self.hand_over()
        return self._here.saved or self._saved or self._path if given is None else given.path

    def _without(self) -> str:
        if self._saved is not None and not self._keeps_id:
            own = "" if self._path is None else f"; the writer's own path is {self._path}"
            raise InvalidStateError(
                f"there is no path to save to: the checkpoint_id {self._saved} was for the save "
                f"before alone, and this save would replace it{own}. Give each save a "
                "checkpoint_id, or a StorageWriter(path) of its own"
            )
        path = self._saved or self._path
        if path is None:
            raise InvalidStateError(
                "there is no path to save to: give StorageWriter one, or the save a checkpoint_id"
            )
        return path
