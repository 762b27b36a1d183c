"""The handle of a background save by several ranks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from ringstow import _native
from ringstow._errors import SaveCancelledError
from ringstow._report import Progress, SaveReport
from ringstow._save_future import SaveHandle, seconds_of


class OwnPart:
    """What this rank writes of a save, which another thread begins."""

    def __init__(self) -> None:
        self._job: _native.SaveJob | None = None
        self._is_cancelled = False
        self._lock = threading.RLock()  # re-entrant: a signal handler may cancel, too

    def begins(self, job: _native.SaveJob) -> None:
        """Follow a job that writes it."""
        with self._lock:
            self._job = job
            if self._is_cancelled:
                job.cancel()

    def cancel(self) -> bool:
        """Cancel the job, also one that has not begun; return whether it had not ended."""
        with self._lock:
            if self._job is not None and self._job.done():
                return False
            self._is_cancelled = True
            if self._job is not None:
                self._job.cancel()
            return True

    def progress(self) -> Progress:
        """Return how far the job has come; zeros before it begins."""
        return Progress(0, 0, 0) if self._job is None else Progress(*self._job.progress())


class RanksHandle(SaveHandle):
    """A save of several ranks in the background: a future of this rank's report."""

    def __init__(
        self,
        path: str,
        upload: concurrent.futures.Future[Any],
        staged: concurrent.futures.Future[None] | None,
        report: Callable[[], SaveReport],
        part: OwnPart,
    ) -> None:
        """Make one.

        Args:
            path: the checkpoint's directory.
            upload: the save.
            staged: is done once this rank's tensors may be changed; None if they may be at once.
            report: returns this rank's report, once the save has ended well.
            part: what this rank writes.
        """
        super().__init__(path)
        self._report = report
        self._staged = staged
        self._part = part
        upload.add_done_callback(self._ended)

    def staged(self) -> bool:
        """Return whether this rank's tensors may be changed: False if the save failed before."""
        self._check_process()
        staged = self._staged
        return staged is None or (staged.done() and staged.exception() is None)

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait as the base class says, for this rank's tensors."""
        self._check_process()
        if self._staged is not None:
            try:
                self._staged.result(seconds_of(timeout))
            except concurrent.futures.TimeoutError:
                if not self._staged.done():
                    return False
                raise
        return True

    def progress(self) -> Progress:
        """Return how far this rank's part of the save has come, in bytes."""
        self._check_process()
        return self._part.progress()

    def cancel(self) -> bool:
        """Cancel on all ranks, as the base class says."""
        self._check_process()
        if self.done() or not self._part.cancel():
            return False
        self._was_cancelled = True
        self._asked()  # the caller knows how it ends
        return True

    def _ended(self, upload: concurrent.futures.Future[Any]) -> None:
        """End with what DCP's future ended with, in the thread of the save."""
        error = upload.exception()
        if error is None:
            self.set_result(self._report())
            return
        if not isinstance(error, SaveCancelledError):  # which another rank has asked for
            self._note_failure(error)
        self.set_exception(error)
