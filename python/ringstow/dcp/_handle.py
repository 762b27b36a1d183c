"""The handle of a background save by several ranks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from ringstow import _native
from ringstow._errors import SaveCancelledError
from ringstow._report import Progress, SaveReport
from ringstow._save_future import SaveFuture, seconds_of


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


class RanksHandle(SaveFuture):
    """A save of several ranks in the background: a future of this rank's report.

    As with `ringstow.SaveHandle`, ``await handle`` works, and a failure that nobody asks for is
    reported. If a rank failed, `result` raises on all ranks: under torch.distributed.checkpoint a
    CheckpointException, whose ``failures`` have each rank's error.
    """

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
        """Wait until this rank's tensors may be changed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            True once every byte has left its tensor, False if the time ran out before.

        Raises:
            Exception: what the save failed of, if it failed before everything was staged.
        """
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
        """Ask the save to stop, on all ranks; an earlier checkpoint is untouched.

        Returns at once. One rank's call is enough: `result` raises SaveCancelledError on all ranks
        (under torch.distributed.checkpoint its own exception), on those that did not call it once
        they have written their part. No effect once this rank has written its own.

        Returns:
            Whether this rank was still writing.
        """
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
