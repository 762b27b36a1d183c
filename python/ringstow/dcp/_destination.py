"""Where a writer's saves go: the path it was made with, or the ``checkpoint_id`` of each save."""

from __future__ import annotations

import threading
from typing import Any

from ringstow._errors import InvalidStateError
from ringstow.dcp._saves import is_saving


class _Given:
    """A path that is good for one save."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_used = False


class _OfThread(threading.local):
    """What one thread gave, and where it saved last."""

    given: _Given | None = None
    saved: str | None = None


class Destination:
    """Where the saves of one writer go.

    A path that a save is given is good for that save alone. Else a writer that is kept over many
    steps would put a save that names none over the step before.
    """

    def __init__(self, path: str | None, *, keeps_id: bool = False) -> None:
        """Make one.

        Args:
            path: for saves that are given none; None for a writer that needs one each time.
            keeps_id: a save without a path goes where the one before went, as with torch's own.
        """
        self._path = path
        self._keeps_id = keeps_id
        self._saved: str | None = None
        self._given: _Given | None = None
        self._here = _OfThread()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # A path that was given goes along, and is used: the save it is for runs elsewhere.
        with self._lock:
            given, self._given = self._given, None
            if given is not None and not given.is_used:
                given.is_used, self._saved = True, given.path
            else:
                given = None
        path = None if given is None else given.path
        return {
            "path": self._path,
            "keeps_id": self._keeps_id,
            "saved": self._saved if path is None else None,
            "given": path,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], keeps_id=state["keeps_id"])  # type: ignore[misc]
        self._saved = state["saved"]
        self._given = None if state["given"] is None else _Given(state["given"])

    def give(self, path: str) -> None:
        """Set the path of the next save: of this thread's, or if none is under way, of any."""
        given = _Given(path)
        self._here.given = given
        if not is_saving(threading.current_thread()):
            self._given = given

    def take(self) -> str:
        """Return the path of the save that begins in this thread.

        Raises:
            InvalidStateError: there is none, or the one that there was is used up.
        """
        with self._lock:
            given = self._next()
            if given is not None:
                given.is_used = True
                path, self._saved = given.path, given.path
                self._here.given = None
            else:
                path = self._without()
        self._here.saved = path
        return path

    def path(self) -> str | None:
        """Return where this thread's save goes, or the next one; None if none was given yet."""
        given = self._next()
        return self._here.saved or self._saved or self._path if given is None else given.path

    def _next(self) -> _Given | None:
        for given in (self._here.given, self._given):
            if given is not None and not given.is_used:
                return given
        return None

    def _without(self) -> str:
        if self._saved is not None and not self._keeps_id:
            own = "" if self._path is None else f"; the writer's own path is {self._path}"
            raise InvalidStateError(
                "this save has no path: the checkpoint_id of the save before, "
                f"{self._saved}, was for that one, and this save would replace it{own}. Give each "
                "save a checkpoint_id, or a StorageWriter(path) of its own"
            )
        path = self._saved or self._path
        if path is None:
            raise InvalidStateError(
                "there is no path to save to: give StorageWriter one, or a checkpoint_id to the "
                "save"
            )
        return path
