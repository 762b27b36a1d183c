"""Saves in progress: waits, unreported failures, the interpreter's exit, and forks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._errors import BusyError, NotDurableError
from ringstow._core._waiting import Patience, patiently
from ringstow._ranks import _concurrent_saves
from ringstow._reports import _done_callbacks
from ringstow._saving._guard import Hold, forget_after_fork

if TYPE_CHECKING:
    from ringstow._reports._io_reports import SaveReport

_log = logging.getLogger("ringstow")

# How often progress is shown.
_TICK_S = 0.1

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""The save of this process that is in progress at a path."""
enders: set[Callable[[], None]] = set()
"""Functions that the exit calls to end the background saves in progress."""
letting_go: list[Callable[[], None]] = []
"""Functions that wait until threads have dropped the memory of finished saves."""
unreported: list[Failure] = []
"""Failures of background saves that have not been reported."""
has_exited = False
"""Whether the exit has stopped waiting for saves."""


class Claim:
    """A save's claim on its path, made before it begins, since a signal handler may save, too."""

    def __init__(self, path: str) -> None:
        self.job: _native.SaveJob | None = None
        self._path = path
        self._met_own = False
        other = _claims.get(path)
        if other is None or (other.job is not None and other.job.done()):
            _claims[path] = self
        else:  # either save may get the directory
            self._met_own = other._met_own = True

    def report(self) -> str:
        """Return the JSON report of a finished job, or raise its failure."""
        assert self.job is not None
        try:
            report = self.job.result()
        except BaseException as error:
            if isinstance(error, NotDurableError):  # it is committed
                _concurrent_saves.saved(self._path)
            raise _concurrent_saves.explained(error, is_own=self._met_own) from None
        _concurrent_saves.saved(self._path)
        return report


def refuse_own(path: str) -> None:
    """Refuse a background save to a path that this process is saving to; it would fail later.

    Raises:
        BusyError: a save of this process to the path has not ended.
    """
    other = _claims.get(path)
    if other is not None and other.job is not None and not other.job.done():
        error = BusyError(f"another save into {path} is in progress", path=path)
        raise _concurrent_saves.explained(error, is_own=True)


class Failure:
    """The failure of a background save, until it is reported."""

    def __init__(self, path: str, error: BaseException) -> None:
        self.path = path
        self.error = error
        self._is_logged = False

    def log(self) -> None:
        """Log the failure, once."""
        if not self._is_logged:
            self._is_logged = True
            _log.error("the save to %s failed: %s", self.path, self.error, exc_info=self.error)


def run(
    begin: Callable[[], _native.SaveJob],
    path: str,
    *,
    hold: Hold | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> SaveReport:
    """Start a save and wait for it, without a Python thread; Ctrl-C cancels it.

    Args:
        begin: a function that starts the save.
        path: the checkpoint's directory.
        hold: makes optimizers wait; ended once every byte has been copied.
        advance: called with the bytes written and the total, ten times a second.
    """
    from ringstow._reports._io_reports import SaveReport

    claim = Claim(path)
    try:
        job = claim.job = begin()
        if hold is not None:
            hold.follow(lambda: job.staged() or job.done())
            _wait(job, job.wait_staged, advance, f"{path} is being saved, not yet copied")
            hold.end()
        _wait(job, job.wait, advance, f"{path} is being written, not yet durable")
        return SaveReport.from_json(claim.report())
    except BaseException:  # also Ctrl-C
        if claim.job is not None:
            abandon(claim.job)
        raise


def _wait(
    job: _native.SaveJob,
    wait: Callable[[float | None], bool],
    advance: Callable[[int, int], None] | None,
    what: str,
) -> None:
    """Wait for a stage of a job, and report its progress meanwhile."""
    if advance is None:
        patiently(wait, what)
        return
    patience = Patience(what)
    while not wait(_TICK_S):
        patience.check()
        _, written, total = job.progress()
        advance(written, total)


def abandon(job: _native.SaveJob) -> None:
    """Cancel a job and wait for its end, despite Ctrl-C: until then it reads the tensors."""
    if not job.done():
        job.cancel()
    while not job.done():
        try:
            job.wait()
        except KeyboardInterrupt:
            continue


def log_unreported() -> None:
    """Log the unreported failures of earlier saves, and the threads' warnings."""
    _native.deliver_log()
    for failure in list(unreported):
        failure.log()


@atexit.register
def _at_exit() -> None:
    """Wait for the saves in progress; make the process exit with 1 if a failure was not reported.

    The exit has waited for the threads of background saves already, unless Ctrl-C cut that short
    or another function of ``atexit`` started the save.
    """
    global has_exited
    for end in list(enders):
        end()
    _native.end_jobs()
    has_exited = True
    log_unreported()
    _done_callbacks.end()
    if unreported:
        _native.fail_exit()
        if sys.stderr is not None:  # besides the log, which may go elsewhere
            more = f" (and {len(unreported) - 1} more)" if len(unreported) > 1 else ""
            print(
                f"ringstow: exit code 1, since the background save to {unreported[0].path}{more} "
                f"failed and its result was never read: {unreported[0].error}",
                file=sys.stderr,
            )


def _after_fork() -> None:
    """In a forked child, forget the parent's saves: the child does not have their threads."""
    enders.clear()
    unreported.clear()
    _claims.clear()
    forget_after_fork()
    _done_callbacks.forget_after_fork()
    _native.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
