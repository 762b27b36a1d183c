"""This rank's part of a background save by several ranks, for its handle."""

from __future__ import annotations

import concurrent.futures
import threading

from ringstow import _native


class OwnPart:
    """This rank's part of a save, which another thread begins: the `Job` of a handle."""

    def __init__(self) -> None:
        self.copied: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once this rank's tensors may be changed; holds the save's failure before that."""
        self._job: _native.SaveJob | None = None
        self._is_cancelled = False
        self._lock = threading.RLock()  # re-entrant: a signal handler may cancel, too

    def begins(self, job: _native.SaveJob) -> None:
        """Attach the native job that writes this rank's part."""
        with self._lock:
            self._job = job
            if self._is_cancelled:
                job.cancel()

    def staged(self) -> bool:
        """Return whether this rank's tensors may be changed: False if the save failed before."""
        return self.copied.done() and self.copied.exception() is None

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until this rank's tensors may be changed, or the save has failed."""
        return bool(concurrent.futures.wait([self.copied], timeout).done)

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._job is not None and self._job.done()

    def progress(self) -> tuple[int, int, int]:
        """Return the progress of the job; zeros before it begins."""
        return (0, 0, 0) if self._job is None else self._job.progress()

    def cancel(self) -> None:
        """Cancel the job, also one that has not begun."""
        with self._lock:
            self._is_cancelled = True
            if self._job is not None:
                self._job.cancel()
