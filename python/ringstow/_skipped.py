"""A save that a manager leaves out, because the one before it is still in progress."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ringstow import _outcomes
from ringstow._copied import Copied
from ringstow._metrics import metrics_of
from ringstow._report import SaveReport

_log = logging.getLogger("ringstow")


class SkippedHandle(Copied):
    """The handle of a step that was not saved: ``skipped`` is true, and it is done.

    `result` returns a report whose ``skipped`` is true, too, and in which nothing was written.
    """

    skipped = True

    def __init__(self, path: str, step: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._path = path
        self.set_result(SaveReport.of_skipped(path, step))

    def __repr__(self) -> str:
        return f"<SkippedHandle {self._path!r}>"

    @property
    def path(self) -> str:
        """Where the step would have been saved."""
        return self._path

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Return True: nobody reads the tensors."""
        return True

    def staged(self) -> bool:
        """Return True: nobody reads the tensors."""
        return True

    def _is_committed(self) -> bool:
        return False


def skip(path: str, step: int, metrics: Mapping[str, Any] | None, before: str) -> SkippedHandle:
    """Say that a step is not saved, and return its handle.

    Args:
        path: where the step would have been saved.
        step: its number.
        metrics: those that the caller gave.
        before: the path of the save in progress.

    Raises:
        TypeError, InvalidStateError: as a save does for such metrics.
    """
    noted = metrics_of(metrics)
    _log.warning(
        "step %d is not saved: the save to %s is still in progress, and the manager has "
        'on_busy="skip". Save less often, or to a faster disk',
        step,
        before,
    )
    handle = SkippedHandle(path, step)
    report = handle.result()
    _outcomes.tell(
        _outcomes.Outcome(kind="skip", path=path, step=step, metrics=noted, report=report)
    )
    return handle
