"""The handle of a background save: a future that also tracks when tensors may be changed.

All handles wait for the save, and report a failure that the program has not read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol

from ringstow._core._errors import Error, InvalidStateError, NotDurableError, SaveCancelledError
from ringstow._core._waiting import patiently
from ringstow._reports._io_reports import Progress, SaveReport
from ringstow._saving import _jobs
from ringstow._saving._guard import Hold


class Job(Protocol):
    """This process's part of a save: a `_native.SaveJob`, or an object that will have one."""

    def staged(self) -> bool:
        """Return whether every byte has left its tensor; never after an earlier failure."""

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until every byte has left its tensor, or the save has failed."""

    def done(self) -> bool:
        """Return whether this process has written its part, or has failed to."""

    def progress(self) -> tuple[int, int, int]:
        """Return the bytes staged, the bytes written, and the total bytes."""

    def cancel(self) -> None:
        """Ask the save to stop."""


class SaveHandle(Future[SaveReport]):
    """A save in the background: a `concurrent.futures.Future` of its report.

    It has two stages. **Staged**: every byte has been copied, and tensors may be changed. **Done**:
    the checkpoint is committed, or the save failed and has cleaned up.

    ``await handle``, ``asyncio.gather(handle)`` and ``concurrent.futures.wait([handle])`` work.
    ``asyncio.wait`` takes only asyncio's futures: pass ``asyncio.wrap_future(handle)``. Cancelling
    the task that awaits it cancels the save; ``asyncio.shield`` prevents that. A cancelled save
    fails with `SaveCancelledError`: `cancelled` returns False, and tasks that await it are not
    cancelled. Callbacks run in the thread that waits for the save.

    `result` raises a failure, `exception` returns it, and `wait_staged` raises a failure before
    staging ended. If you call none of them, the failure is logged to the logger ``ringstow`` when
    the next save starts, the handle is dropped or the interpreter exits; a process that would have
    exited with 0 then exits with 1.

    On several ranks, `progress` and the report are this rank's. If a rank failed, `result` raises
    on all ranks. Under torch.distributed.checkpoint it raises a CheckpointException, whose
    ``failures`` hold each rank's error.

    All methods raise `Error` in a process that inherited the handle over a fork.
    """

    skipped: bool = False
    """Whether the step was not saved, because of a manager's ``on_busy="skip"``."""
    _copies: Future[bool] | None = None
    """The future of whether all copies exist; None if this process copies nothing."""
    _explain: Callable[[BaseException], None] | None = None
    _error: BaseException | None = None
    _trace: TracebackType | None = None
    """The failure's original traceback, set again each time that it is raised."""
    _was_cancelled = False
    """Whether `cancel` was called while the save was in progress."""

    def __init__(self, path: str, job: Job | None = None, hold: Hold | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._path = path
        self._job = job  # None if nothing is in progress
        self._hold = hold  # counts how long the caller waits
        self._caller = threading.get_ident()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant: a signal handler may ask, too
        self._is_asked = False
        self._failure: _jobs.Failure | None = None

    def __repr__(self) -> str:
        if self._pid != os.getpid():
            state = "in another process"
        elif Future.done(self):
            state = "done"
        else:
            state = "staged" if self.staged() else "staging"
        return f"<SaveHandle {self._path!r} {state}>"

    def __await__(self) -> Generator[Any, None, SaveReport]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)
        # At the interpreter's exit modules may be gone; the exit has already reported the failure.
        if failure is not None and os is not None and self._pid == os.getpid():
            failure.log()

    @property
    def path(self) -> str:
        """The checkpoint's directory."""
        return self._path

    def staged(self) -> bool:
        """Return whether every byte has left its tensor: False if the save failed before."""
        job = self._own_job()
        return job is None or job.staged()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the tensors may be changed.

        Args:
            timeout: seconds to wait; None waits without limit.

        Returns:
            True once every byte has left its tensor, False if the time ran out before.

        Raises:
            Exception: the save's failure, if it failed before everything was staged. There will be
                no checkpoint, and the tensors may be changed.
        """
        if self.staged():
            return True
        job = self._job
        assert job is not None
        with self._waits(is_callers=True):
            seconds = seconds_of(timeout)
            if seconds is None:
                patiently(job.wait_staged, self._awaited("which has not copied all tensors"))
            elif not job.wait_staged(seconds):
                return False
        if not job.staged():  # it failed before
            self.result()
        return True

    def progress(self) -> Progress:
        """Return the progress of this process's part of the save, in bytes."""
        job = self._own_job()
        return Progress(0, 0, 0) if job is None else Progress(*job.progress())

    def cancel(self) -> bool:
        """Ask the save to stop and remove its files; an earlier checkpoint is unchanged.

        Returns at once; `result` raises SaveCancelledError once the save has stopped. No effect
        once the checkpoint is committed, or on several ranks once this rank's part is written.

        One rank's call is enough: `result` raises SaveCancelledError on all ranks. The others stop
        writing within a second, on other nodes with ``nodes=`` once they have written.

        Returns:
            Whether the save was still in progress.
        """
        job = self._own_job()
        if job is None or self.done() or job.done():
            return False
        self._asked()  # the caller knows the outcome
        self._was_cancelled = True
        job.cancel()
        return True

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        self._check_process()
        return super().done()

    def running(self) -> bool:
        """Return whether the save is in progress."""
        return not self.done()

    def cancelled(self) -> bool:
        """Return False: a cancelled save fails with SaveCancelledError."""
        self._check_process()
        return False

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed, and return the save's report.

        May be called again: it returns the same report, or raises the same error.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the time ran out; the save continues.
            SaveCancelledError: the save was cancelled.
            OSError: the system refused: no space, no permission, a failing disk.
            Error: any other failure of the save.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(self._trace)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, and return its failure; None if it is committed.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the time ran out; the save continues.
        """
        self._check_process()
        with self._waits():
            seconds = seconds_of(timeout)
            if seconds is None:
                patiently(self._ends, self._awaited("which is not durable"))
            try:
                error = super().exception(seconds)
            except TimeoutError:
                message = f"the save to {self._path} is not done after {timeout} s"
                raise TimeoutError(message) from None
        self._asked()
        return error

    def add_done_callback(self, fn: Callable[[Future[SaveReport]], object]) -> None:
        """Call a function with the handle once the save has ended, or now if it has."""
        self._check_process()
        super().add_done_callback(fn)

    def promoted(self) -> bool:
        """Return whether the checkpoint is on all tiers: False before that, and after a failure."""
        copies = self._copies if self.done() else None
        return copies is not None and copies.done() and not copies.exception() and copies.result()

    def wait_promoted(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint is committed, and is on all tiers.

        Args:
            timeout: seconds to wait; None waits without limit.

        Returns:
            True once all tiers have it. False if the time ran out, or if a newer step was queued
            before the copy of this one began.

        Raises:
            Exception: the failure of the save or of the copy.
            InvalidStateError: no tiers are named, or another rank copies: the first rank does.
        """
        copies = self._copies
        if copies is None:
            raise InvalidStateError(
                f"this process does not copy {self.path} anywhere: name tiers in Config or "
                "CheckpointManager, and on several ranks ask the first one"
            )
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self.result(timeout)
            return copies.result(None if until is None else max(until - time.monotonic(), 0))
        except TimeoutError:
            if self.done() and (copies.done() or not self._is_committed()):
                raise  # the failure of the save or of the copy
            return False

    def set_exception(self, exception: BaseException | None) -> None:
        """End with a failure, after adding its explanation."""
        self._error = exception
        if exception is not None:
            self._trace = exception.__traceback__
            if self._explain is not None:
                self._explain(exception)
        super().set_exception(exception)

    def _explained_by(self, explain: Callable[[BaseException], None]) -> None:
        """Explain a failure before the program sees it, also a failure that is already set."""
        self._explain = explain
        if self._error is not None:
            explain(self._error)

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Return the state: newer versions of asyncio call this instead of `exception`."""
        self._check_process()
        future: Any = super()  # older versions of Future lack this method, and nothing calls it
        snapshot: tuple[bool, bool, Any, BaseException | None] = future._get_snapshot()
        if snapshot[0]:
            self._asked()
        return snapshot

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise Error(
                f"the save to {self._path} belongs to process {self._pid}, which started it; "
                "this process was forked from that one and cannot ask about it"
            )

    def _own_job(self) -> Job | None:
        self._check_process()
        return self._job

    def _waits(self, *, is_callers: bool = False) -> contextlib.AbstractContextManager[object]:
        """Return the context manager to enter while the caller waits."""
        # Another thread may wait for the whole save without blocking training.
        is_callers = is_callers or threading.get_ident() == self._caller
        hold = self._hold if is_callers else None
        return contextlib.nullcontext() if hold is None else hold.waited.here()

    def _ends(self, seconds: float | None) -> bool:
        try:
            Future.exception(self, seconds)
        except TimeoutError:
            return False
        return True

    def _awaited(self, why: str) -> str:
        return f"the program waits for the save to {self._path}, {why}"

    # Reporting a failure.

    def _note_failure(self, error: BaseException) -> None:
        """Register a failure to report, before it is set, unless the caller has asked for it."""
        with self._lock:
            if not self._is_asked:
                self._failure = _jobs.Failure(self._path, error)
                _jobs.unreported.append(self._failure)

    def _asked(self) -> None:
        """Note that the caller gets the failure, so that it is not reported again."""
        with self._lock:
            self._is_asked = True
            failure, self._failure = self._failure, None
        if failure in _jobs.unreported:
            _jobs.unreported.remove(failure)

    def _unasked_failure(self) -> BaseException | None:
        """Return the failure of the finished save, unless it has been reported.

        A cancelled save counts as no failure, on whichever rank it was cancelled.
        """
        was_asked, error = self._is_asked, self.exception()
        return None if was_asked or isinstance(error, SaveCancelledError) else error

    # Both read the future itself: the handle's own `exception` would count as reporting a failure.

    def _is_committed(self) -> bool:
        """Return whether the checkpoint is committed."""
        return Future.done(self) and Future.exception(self) is None

    def _may_be_lost(self) -> bool:
        """Return whether the checkpoint is committed, but may not survive a crash."""
        return Future.done(self) and isinstance(Future.exception(self), NotDurableError)


def seconds_of(timeout: float | None) -> float | None:
    """Return the timeout, limited to what every clock accepts."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:
        return None
    return max(timeout, 0.0)
