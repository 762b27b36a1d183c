"""The handles of a background save by one process, and of a skipped step."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ringstow import _native
from ringstow._core import _formatting
from ringstow._core._errors import NotDurableError
from ringstow._core._waiting import patiently
from ringstow._reports import _done_callbacks
from ringstow._reports._io_reports import Progress, SaveReport
from ringstow._saving import _jobs
from ringstow._saving._copy_queue import Copier
from ringstow._saving._guard import Hold
from ringstow._saving._save_future import SaveHandle

_log = logging.getLogger("ringstow")


class ProcessHandle(SaveHandle):
    """A save by one process."""

    _job: _native.SaveJob
    _hold: Hold

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
        super().__init__(path, job, hold)
        self._claim = claim
        self._owners = owners
        self._step, self._metrics = noted
        self._copier = copier
        self._copies = None if copier is None else copier.expected()
        # The interpreter's exit waits only for threads that exist when it begins.
        self._is_late = not threading.main_thread().is_alive()
        self._is_whole = is_whole
        hold.follow(lambda: job.staged() or job.done())
        if is_whole:
            hold.end()

    def staged(self) -> bool:
        """Return whether every byte has left its tensor: False if the save failed before."""
        return super().staged() or self._is_whole

    def progress(self) -> Progress:
        """Return the progress of the save, in bytes."""
        found = super().progress()
        return dataclasses.replace(found, staged=found.total) if self._is_whole else found

    def _watch(self) -> None:
        """Wait for the save and set its outcome, in a thread of its own.

        The thread imports and logs nothing before the outcome is set: a signal handler may wait for
        it that interrupted an import, or a thread with the lock of a logging handler.
        """
        try:
            self._job.wait_staged(logs=False)
            self._let_go()
            self._job.wait(logs=False)
        finally:
            line = self._settle()
        _native.deliver_log()
        if line is not None:
            _done_callbacks.log(line)

    def _settle(self) -> str | None:
        """Set the outcome, and return the line to log."""
        self._let_go()
        line = None
        try:
            report = SaveReport.from_json(self._claim.report())
        except BaseException as error:
            self._note_failure(error)
            # Drop the traceback: its frames refer to this handle, which could not be freed.
            error = error.with_traceback(None)
            if self._copier is not None and isinstance(error, NotDurableError):
                self._copier.rescue(self._path, self._copies)
            self._tell(error=error)
            self.set_exception(error)
        else:
            blocked_seconds = self._hold.waited.seconds()
            report = dataclasses.replace(report, step=self._step, blocked_seconds=blocked_seconds)
            line = _formatting.of_save(report)
            if self._copier is not None:
                self._copier.add(self._path, is_new=True, ended=self._copies)
            self._tell(report=report, metrics=self._metrics)
            self.set_result(report)
        _jobs.enders.discard(self._end_at_exit)
        return line

    def _tell(self, **how: Any) -> None:
        """Call the callbacks before the program can see that the save is done, and remove one."""
        _done_callbacks.tell(
            _done_callbacks.Outcome(kind="save", path=self._path, step=self._step, **how)
        )

    def _let_go(self) -> None:
        """Allow changes to the tensors, and drop the references to them."""
        if not self._job.staged():  # nothing has waited for the copies
            self._hold.wait_copied()
        self._owners.clear()
        self._hold.end()

    def _wait_copied(self) -> None:
        """Wait until the tensors may be changed; `result` raises a failure."""
        patiently(self._job.wait_staged, self._awaited("which has not copied all tensors"))

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


class SkippedHandle(SaveHandle):
    """The handle of a skipped step: ``skipped`` is true, and it is done.

    `result` returns a report whose ``skipped`` is also true, with no bytes written.
    """

    skipped = True

    def __init__(self, path: str, step: int) -> None:
        super().__init__(path)
        self.set_result(SaveReport.of_skipped(path, step))

    def wait_promoted(self, timeout: float | None = None) -> bool:
        """Return False: nothing is copied."""
        return False

    def _check_process(self) -> None:
        """Do nothing: a forked child may use this handle, too."""

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
) -> ProcessHandle:
    """Start a save in the background, and a thread that waits for it.

    The thread is not a daemon, so that the interpreter's exit waits for it. If this raises, also
    for Ctrl-C, the save has ended, since the caller gets no handle to wait on.

    Args:
        begin: a function that starts the save.
        path: the checkpoint's directory.
        owners: lists that keep the tensors' memory; emptied once every byte has been copied.
        hold: makes optimizers wait; ended once every byte has been copied.
        noted: the step and the metrics that the caller gave.
        copier: copies the checkpoint to tiers, once it is committed.
        is_whole: whether all tensors were copied at the call, so that they may be changed at once.
    """
    if _jobs.has_exited:
        raise RuntimeError(
            f"cannot save to {path} in the background: the interpreter is exiting and does not "
            "wait for it any more. Use ringstow.save"
        )
    claim = _jobs.Claim(path)
    handle: ProcessHandle | None = None
    try:
        claim.job = begin()
        handle = ProcessHandle(
            claim, claim.job, path, owners, hold, noted, copier, is_whole=is_whole
        )
        _jobs.enders.add(handle._end_at_exit)
        threading.Thread(target=handle._watch, name="ringstow-save", daemon=False).start()
    except BaseException:  # also Ctrl-C
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
    """Log that a step is not saved, and return its handle.

    Args:
        path: where the step would have been saved.
        step: its number.
        metrics: the metrics that the caller gave.
        before: the path of the save in progress.
        is_first: whether this is the first step skipped because of that save; only then warn.
    """
    _log.log(
        logging.WARNING if is_first else logging.INFO,
        "step %d is not saved: the save to %s is still in progress, and "
        'on_busy="skip" skips it. Save less often, or to a faster disk',
        step,
        before,
    )
    handle = SkippedHandle(path, step)
    report = handle.result()
    _done_callbacks.tell(
        _done_callbacks.Outcome(kind="skip", path=path, step=step, metrics=metrics, report=report)
    )
    return handle
