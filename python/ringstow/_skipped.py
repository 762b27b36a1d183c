"""A save that a manager leaves out, because the one before it is still in progress."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from typing import Any

from ringstow import _outcomes
from ringstow._copied import Copied
from ringstow._report import Progress, SaveReport

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

    def __await__(self) -> Generator[Any, None, SaveReport]:
        return self.result()
        yield

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Return True: nobody reads the tensors."""
        return True

    def staged(self) -> bool:
        """Return True: nobody reads the tensors."""
        return True

    def progress(self) -> Progress:
        """Return that there is nothing to do."""
        return Progress(0, 0, 0)

    def wait_promoted(self, timeout: float | None = None) -> bool:
        """Return False: nothing is copied."""
        return False

    def _is_committed(self) -> bool:
        return False


def skip(
    path: str, step: int, metrics: Mapping[str, float], before: str, *, is_first: bool
) -> SkippedHandle:
    """Say that a step is not saved, and return its handle.

    Args:
        path: where the step would have been saved.
        step: its number.
        metrics: those that the caller gave.
        before: the path of the save in progress.
        is_first: whether this is the first step that is left out for that save, of which a warning
            tells.
    """
    _log.log(
        logging.WARNING if is_first else logging.INFO,
        "step %d is not saved: the save to %s is still in progress, and the manager has "
        'on_busy="skip". Save less often, or to a faster disk',
        step,
        before,
    )
    handle = SkippedHandle(path, step)
    report = handle.result()
    _outcomes.tell(
        _outcomes.Outcome(kind="skip", path=path, step=step, metrics=metrics, report=report)
    )
    return handle
