"""The handle of a background save by several ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ringstow import _jobs
from ringstow._copied import Copied
from ringstow._patience import patiently
from ringstow._report import SaveReport


class RanksHandle(Copied):
    """A save of several ranks in the background: a future of this rank's report.

    If a rank failed, `result` raises on all ranks: under torch.distributed.checkpoint a
    CheckpointException, whose ``failures`` have each rank's error. If nobody asks, the failure is
    reported as that of a `SaveHandle`.
    """

    def __init__(
        self,
        path: str,
        upload: concurrent.futures.Future[Any],
        staged: concurrent.futures.Future[None] | None,
        report: Callable[[], SaveReport],
    ) -> None:
        """Make one.

        Args:
            path: the checkpoint's directory.
            upload: the save.
            staged: is done once this rank's tensors may be changed; None if they may be at once.
            report: returns this rank's report, once the save has ended well.
        """
        super().__init__()
        self.set_running_or_notify_cancel()
        self._path = path
        self._report = report
        self._lock = threading.RLock()
        self._is_asked = False
        self._failure: _jobs.Failure | None = None
        self._staged = staged
        upload.add_done_callback(self._ended)

    def __repr__(self) -> str:
        return f"<RanksHandle {self._path!r} {'done' if self.done() else 'saving'}>"

    @property
    def path(self) -> str:
        """The checkpoint's directory."""
        return self._path

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until this rank's tensors may be changed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            True once every byte has left its tensor, False if the time ran out before.

        Raises:
            Exception: what the save failed of, if it failed before everything was staged.
        """
        if self._staged is not None:
            try:
                self._staged.result(timeout)
            except concurrent.futures.TimeoutError:
                if not self._staged.done():
                    return False
                raise
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed, and return this rank's report.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time ran out; the save goes on.
            BaseException: what the save failed of, on all ranks.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, and return what it failed of; None if it is committed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time ran out; the save goes on.
        """
        if timeout is None:
            patiently(self._ends, f"the program waits for the save to {self._path}")
        error = super().exception(timeout)
        with self._lock:
            self._is_asked = True
            failure, self._failure = self._failure, None
        with contextlib.suppress(ValueError):
            if failure is not None:
                _jobs.unreported.remove(failure)
        return error

    def _ends(self, seconds: float | None) -> bool:
        try:
            super().exception(seconds)
        except concurrent.futures.TimeoutError:
            return False
        return True

    def _unasked_failure(self) -> BaseException | None:
        was_asked, error = self._is_asked, self.exception()
        return None if was_asked else error

    def _ended(self, upload: concurrent.futures.Future[Any]) -> None:
        """End with what DCP's future ended with, in the thread of the save."""
        error = upload.exception()
        if error is None:
            self.set_result(self._report())
            return
        with self._lock:
            if not self._is_asked:
                self._failure = _jobs.Failure(self._path, error)
                _jobs.unreported.append(self._failure)
        self.set_exception(error)
