"""The step and the metrics that a writer notes in the checkpoint of its next save."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from ringstow._core._arguments import step_number
from ringstow._core._metrics import metrics_of


@dataclasses.dataclass(eq=False)
class Note:
    """The note of one save."""

    step: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    is_used: bool = False


class _Here(threading.local):
    """The note that one thread gave."""

    note: Note | None = None


class Notes:
    """The notes of one writer, each valid for one save.

    A note is handed over with the state that its thread stages, so that a save that begins late in
    another thread does not get the next save's note. A save without such a note takes the writer's
    last note: with a stager other than the writer, no thread hands one over.
    """

    def __init__(self) -> None:
        self._last: Note | None = None
        self._here = _Here()
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too

    def __getstate__(self) -> dict[str, Any]:
        # Its save runs in another process.
        return {"note": self.take()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        note = state["note"]
        self.give(note.step, note.metrics)

    def give(self, step: int | None, metrics: Mapping[str, Any] | None) -> None:
        """Set the note of the next save."""
        note = Note(step_number(step), metrics_of(metrics))
        with self._lock:
            self._here.note = self._last = note

    def hand_over(self) -> Note | None:
        """Return the note of this thread's next save, for the thread that makes it."""
        return next((note for note in (self._here.note, self._last) if _is_unused(note)), None)

    def receive(self, note: Note | None) -> None:
        """Set the note that another thread hands over, unless this thread was given its own."""
        if not _is_unused(self._here.note):
            self._here.note = note or Note()

    def take(self) -> Note:
        """Use up the note of the save that begins in this thread; an empty one if there is none."""
        with self._lock:  # another thread may hold the same note
            note = self.hand_over() or Note()
            note.is_used = True
            return note


def _is_unused(note: Note | None) -> bool:
    return note is not None and not note.is_used
