"""The handle of a background save: a future, with the moment from which tensors may be changed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any

from ringstow import _jobs, _lines, _native, _outcomes
from ringstow._copied import Copied
from ringstow._copier import Copier
from ringstow._errors import Error, NotDurableError
from ringstow._guard import Hold
from ringstow._patience import patiently
from ringstow._report import Progress, SaveReport

_log = logging.getLogger("ringstow")


class SaveHandle(Copied):
    """A save in the background: a `concurrent.futures.Future` of its report.

    It has two moments. **Staged**: the last byte has left its tensor, which may be changed from
    then on. **Done**: the checkpoint is committed, or the save failed and has cleaned up.

    ``await handle``, ``asyncio.gather(handle)`` and ``concurrent.futures.wait([handle])`` work.
    ``asyncio.wait`` takes only asyncio's futures: ``asyncio.wrap_future(handle)``. Cancelling the
    task that awaits it cancels the save; ``asyncio.shield`` prevents that. A cancelled save has
    failed with `SaveCancelledError`: `cancelled` returns False, and no task that awaits it is
    cancelled. Callbacks run in the thread that watches over the save.

    `result` raises a failure, `exception` returns it, and `wait_staged` raises one that came before
    that moment. If you call none of them, the failure is logged, to the logger ``ringstow``, when
    the next save starts, the handle is dropped or the interpreter exits; and a process that would
    have exited with 0 exits with 1.

    All methods raise `Error` in a process that inherited the handle over a fork.
    """

    def __init__(
        self,
        claim: _jobs.Claim,
        job: _native.SaveJob,
        path: str,
        owners: list[object],
        hold: Hold,
        noted: tuple[int | None, dict[str, float]],
        copier: Copier | None,
        *,
        is_whole: bool,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._claim = claim
        self._job = job
        self._path = path
        self._owners = owners
        self._hold = hold
        self._step, self._metrics = noted
        self._copier = copier
        self._copies = None if copier is None else copier.expected()
        self._pid = os.getpid()
        self._caller = threading.get_ident()
        self._lock = threading.RLock()  # re-entrant: a signal handler may ask, too
        # The interpreter's exit waits only for the threads that there are when it begins.
        self._is_late = not threading.main_thread().is_alive()
        self._is_asked = False
        self._failure: _jobs.Failure | None = None
        self._is_whole = is_whole
        hold.follow(lambda: job.staged() or job.done())
        if is_whole:
            hold.end()

    def __repr__(self) -> str:
        if self._pid != os.getpid():
            state = "in another process"
        elif self._job.done():
            state = "done"
        else:
            state = "staged" if self.staged() else "staging"
        return f"<SaveHandle {self._path!r} {state}>"

    def __await__(self) -> Generator[Any, None, SaveReport]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)
        # At the interpreter's exit modules may be gone: the exit has told of the failure.
        if failure is not None and os is not None and self._pid == os.getpid():
            failure.log()

    @property
    def path(self) -> str:
        """The checkpoint's directory."""
        return self._path

    def staged(self) -> bool:
        """Return whether every byte has left its tensor: False if the save failed before."""
        job = self._own_job()
        return self._is_whole or job.staged()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        self._own_job()
        return super().done()

    def running(self) -> bool:
        """Return whether the save is in progress."""
        return not self.done()

    def cancelled(self) -> bool:
        """Return False: a cancelled save has failed with SaveCancelledError."""
        self._own_job()
        return False

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the tensors may be changed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            True once every byte has left its tensor, False if the time ran out before.

        Raises:
            Exception: what the save failed of, if it failed before everything was staged: there
                will be no checkpoint of this moment. The tensors may then be changed as well.
        """
        job = self._own_job()
        if self._is_whole:
            return True
        with self._hold.waited.here():
            seconds = _seconds(timeout)
            if seconds is None:
                patiently(job.wait_staged, self._awaited("which has not copied all tensors"))
            elif not job.wait_staged(seconds):
                return False
        if not job.staged():  # it failed before
            self.result()
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed, and return the save's report.

        May be called again: it returns the same report, or raises the same error.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time ran out; the save goes on.
            SaveCancelledError: it was cancelled.
            OSError: the system refused: no space, no permission, a failing disk.
            Error: any other failure of the save.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, and return what it failed of; None if it is committed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time ran out; the save goes on.
        """
        self._own_job()
        # Another thread may wait for all of the save, and hold up nobody.
        is_callers = threading.get_ident() == self._caller
        with self._hold.waited.here() if is_callers else contextlib.nullcontext():
            seconds = _seconds(timeout)
            if seconds is None:
                patiently(self._ends, self._awaited("which is not durable"))
            try:
                error = super().exception(seconds)
            except TimeoutError:
                message = f"the save to {self._path} is not done after {timeout} s"
                raise TimeoutError(message) from None
        self._asked()
        return error

    def progress(self) -> Progress:
        """Return how far the save has come, in bytes."""
        return Progress(*self._own_job().progress())

    def cancel(self) -> bool:
        """Ask the save to stop and to remove what it wrote; an earlier checkpoint is untouched.

        Returns at once; `result` raises SaveCancelledError once the save has stopped. No effect
        once the checkpoint is committed.

        Returns:
            Whether the save was still in progress.
        """
        job = self._own_job()
        if job.done():
            return False
        self._asked()  # the caller knows how it ends
        job.cancel()
        return True

    def add_done_callback(self, fn: Callable[[Future[SaveReport]], object]) -> None:
        """Call a function with the handle once the save has ended, or now if it has."""
        self._own_job()
        super().add_done_callback(fn)

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Return the state: newer versions of asyncio read it by this in place of `exception`."""
        self._own_job()
        future: Any = super()  # older versions of Future have no such method, and nobody calls it
        snapshot: tuple[bool, bool, Any, BaseException | None] = future._get_snapshot()
        if snapshot[0]:
            self._asked()
        return snapshot

    def _own_job(self) -> _native.SaveJob:
        if self._pid != os.getpid():
            raise Error(
                f"the save to {self._path} belongs to process {self._pid}, which started it; "
                "this process was forked from that one and cannot ask about it"
            )
        return self._job

    def _asked(self) -> None:
        """Note that the caller learns of a failure: it is not reported in another way."""
        with self._lock:
            self._is_asked = True
            failure, self._failure = self._failure, None
        if failure in _jobs.unreported:
            _jobs.unreported.remove(failure)

    def _unasked_failure(self) -> BaseException | None:
        """Return what the save, which has ended, failed of, unless somebody has asked already."""
        was_asked, error = self._is_asked, self.exception()
        return None if was_asked else error

    def _watch(self) -> None:
        """See the save through, in a thread of its own.

        The thread imports and logs nothing before the outcome is there: it may be awaited by a
        signal handler that interrupted an import, or holds the lock of a logging handler.
        """
        try:
            self._job.wait_staged(logs=False)
            self._let_go()
            self._job.wait(logs=False)
        finally:
            line = self._settle()
        _native.deliver_log()
        if line is not None:
            _outcomes.log(line)

    def _settle(self) -> str | None:
        """Set the outcome, and return the line to log."""
        self._let_go()
        line = None
        try:
            report = SaveReport.from_json(self._claim.report())
        except BaseException as error:
            with self._lock:
                if not self._is_asked:
                    self._failure = _jobs.Failure(self._path, error)
                    _jobs.unreported.append(self._failure)
            # Without its frames, which know this handle: it could not be dropped.
            error = error.with_traceback(None)
            if self._copier is not None and isinstance(error, NotDurableError):
                self._copier.rescue(self._path, self._copies)
            self._tell(error=error)
            self.set_exception(error)
        else:
            blocked_seconds = self._hold.waited.seconds()
            report = dataclasses.replace(report, step=self._step, blocked_seconds=blocked_seconds)
            line = _lines.of_save(report)
            if self._copier is not None:
                self._copier.add(self._path, is_new=True, ended=self._copies)
            self._tell(report=report, metrics=self._metrics)
            self.set_result(report)
        _jobs.enders.discard(self._end_at_exit)
        return line

    def _tell(self, **how: Any) -> None:
        """Have the callbacks called, before anybody can know of the end and remove one."""
        _outcomes.tell(_outcomes.Outcome(kind="save", path=self._path, step=self._step, **how))

    def _let_go(self) -> None:
        """Let the tensors be changed, and freed."""
        if not self._job.staged():  # nothing has waited for the copies
            self._hold.wait_copied()
        self._owners.clear()
        self._hold.end()

    def _wait_copied(self) -> None:
        """Wait until the tensors may be changed, and leave a failure to `result`."""
        patiently(self._job.wait_staged, self._awaited("which has not copied all tensors"))

    def _ends(self, seconds: float | None) -> bool:
        try:
            super().exception(seconds)
        except TimeoutError:
            return False
        return True

    def _awaited(self, why: str) -> str:
        return f"the program waits for the save to {self._path}, {why}"

    def _abandon(self) -> None:
        """Cancel the save and wait for its end."""
        self._asked()
        _jobs.abandon(self._job)

    def _end_at_exit(self) -> None:
        """Wait for the save if it was started during the exit, cancel it otherwise."""
        try:
            if self._is_late:
                self._job.wait()
        finally:
            _jobs.abandon(self._job)
            super().exception()


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


def start(
    begin: Callable[[], _native.SaveJob],
    path: str,
    owners: list[object],
    hold: Hold,
    noted: tuple[int | None, dict[str, float]],
    copier: Copier | None,
    *,
    is_whole: bool = False,
) -> SaveHandle:
    """Start a save in the background, and a thread that watches over it.

    The thread is not a daemon, so that the interpreter's exit waits for it. If this raises, Ctrl-C
    included, the save has ended: nobody could wait for it before changing the tensors.

    Args:
        begin: starts the save.
        path: the checkpoint's directory.
        owners: what keeps the tensors' memory; emptied once every byte has left its tensor.
        hold: ends then, too.
        noted: the step and the metrics that the caller gave.
        copier: copies the checkpoint on, once it is committed.
        is_whole: whether copies of all tensors are saved, which may be changed at once.
    """
    if _jobs.has_exited:
        raise RuntimeError(
            f"cannot save to {path} in the background: the interpreter is exiting and does not "
            "wait for it any more. Use ringstow.save"
        )
    claim = _jobs.Claim(path)
    handle: SaveHandle | None = None
    try:
        claim.job = begin()
        handle = SaveHandle(claim, claim.job, path, owners, hold, noted, copier, is_whole=is_whole)
        _jobs.enders.add(handle._end_at_exit)
        threading.Thread(target=handle._watch, name="ringstow-save", daemon=False).start()
    except BaseException:  # Ctrl-C besides
        if handle is not None:
            handle._asked()
            _jobs.enders.discard(handle._end_at_exit)
        if claim.job is not None:
            _jobs.abandon(claim.job)
        raise
    return handle


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


def _seconds(timeout: float | None) -> float | None:
    """Return a timeout that every clock can take."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:
        return None
    return max(timeout, 0.0)
