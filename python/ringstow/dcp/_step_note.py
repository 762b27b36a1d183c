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
    """What one save notes."""

    step: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    is_used: bool = False


class _Here(threading.local):
    """What one thread gave."""

    note: Note | None = None


class Notes:
    """The notes of one writer, each good for one save.

    A note goes with the state that its thread stages, so that a save which begins late in another
    thread does not get the note of the one after it. A save without such a note takes the writer's
    last: with another stager than the writer, no thread hands one over.
    """

    def __init__(self) -> None:
        self._last: Note | None = None
        self._here = _Here()
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too

    def __getstate__(self) -> dict[str, Any]:
        # The save that it is for runs elsewhere.
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
        """Set what another thread hands over, unless this one was given a note itself."""
        if not _is_unused(self._here.note):
            self._here.note = note or Note()

    def take(self) -> Note:
        """Use up the note of the save that begins in this thread; an empty one if there is none."""
        with self._lock:  # another thread may have the same one
            note = self.hand_over() or Note()
            note.is_used = True
            return note


def _is_unused(note: Note | None) -> bool:
    return note is not None and not note.is_used
