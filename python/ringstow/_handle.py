"""A save under way: the handle that the caller holds and the thread that watches over it.

The thread keeps the tensors alive until they are staged, makes the interpreter's exit wait (it is
no daemon), and sees to it that a failure nobody asked about is not lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringstow import _native, _others
from ringstow._errors import Error
from ringstow._guard import Hold, forget_after_fork

if TYPE_CHECKING:
    from ringstow._report import Progress, SaveReport

_log = logging.getLogger("ringstow")

# Guards every flight's outcome. Re-entrant: the garbage collector may drop a handle anywhere, and a
# signal's handler may save. For the same reason nothing is imported or logged while it is held: the
# thread that has the lock for that may be the one that waits for this.
_lock = threading.RLock()
# Of the save of this process that is under way at a path.
_at: weakref.WeakValueDictionary[str, _Claim] = weakref.WeakValueDictionary()
# Saves in progress, and those that failed, as long as nobody has been told of the failure.
_unreported: list[_Flight] = []


class SaveHandle:
    """A save that runs in the background.

    It has two moments. **Staged**: the last byte has left its tensor, which may be changed from
    then on. **Done**: the checkpoint is committed, or the save failed and has cleaned up.

    A failure is raised by `result` (and by `wait_staged`, if it came before that moment). If
    nobody asks, it is logged, to the logger ``ringstow``, when the next save starts, the handle is
    dropped or the interpreter exits; and a process that would have exited with 0 exits with 1.
    """

    def __init__(self, flight: _Flight) -> None:
        self._flight = flight
        # Its thread holds the flight, not the handle: so the handle's end can be noticed.
        # Weakly: `_unreported` keeps the flight while somebody is to be told. Once somebody was,
        # its error knows the frames that it was raised through, which may know this handle.
        weakref.finalize(self, _drop, weakref.ref(flight)).atexit = False

    def __repr__(self) -> str:
        flight = self._flight
        if flight.pid != os.getpid():
            state = "in another process"
        elif flight.job.done():
            state = "done"
        else:
            state = "staged" if flight.job.staged() else "staging"
        return f"<SaveHandle {flight.path!r} {state}>"

    @property
    def path(self) -> str:
        """The checkpoint's directory."""
        return self._flight.path

    def staged(self) -> bool:
        """Tell whether every byte has left its tensor. A save that failed before never gets there.

        Raises:
            Error: the handle was inherited over a fork.
        """
        return self._mine().job.staged()

    def done(self) -> bool:
        """Tell whether the save has ended, well or not.

        Raises:
            Error: the handle was inherited over a fork.
        """
        return self._mine().job.done()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the tensors may be changed.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            True once every byte has left its tensor, False if the time ran out before.

        Raises:
            Exception: what the save failed of, if it failed before everything was staged: there
                will be no checkpoint of this moment. The tensors may then be changed as well.
            Error: the handle was inherited over a fork.
        """
        flight = self._mine()
        if not flight.job.wait_staged(_seconds(timeout)):
            return False
        if not flight.job.staged():  # it ended before
            flight.job.wait()
            flight.tell()
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed.

        May be called again: it returns the same report, or raises the same error.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time ran out; the save goes on.
            SaveCancelledError: it was cancelled.
            OSError: the system refused: no space, no permission, a failing disk.
            Error: any other failure of the save; or the handle was inherited over a fork.
        """
        flight = self._mine()
        if not flight.job.wait(_seconds(timeout)):
            raise TimeoutError(f"the save to {flight.path} is not done after {timeout} s")
        return flight.tell()

    def progress(self) -> Progress:
        """Return how far the save has come, in bytes.

        Raises:
            Error: the handle was inherited over a fork.
        """
        from ringstow._report import Progress

        return Progress(*self._mine().job.progress())

    def cancel(self) -> None:
        """Ask the save to stop and to remove what it wrote; an earlier checkpoint is untouched.

        Returns at once: `result` raises SaveCancelledError when it has. Too late a call changes
        nothing.

        Raises:
            Error: the handle was inherited over a fork.
        """
        flight = self._mine()
        if not flight.job.done():
            flight.told()  # who cancels knows how it ends
            flight.job.cancel()

    def _wait_copied(self) -> None:
        """Wait until the tensors may be changed; a failure is for who asks."""
        self._flight.job.wait_staged()

    def _abandon(self) -> None:
        self.cancel()
        abandon(self._flight.job)

    def _mine(self) -> _Flight:
        flight = self._flight
        if flight.pid != os.getpid():
            raise Error(
                f"the save to {flight.path} belongs to process {flight.pid}, which started it; "
                "this process was forked from that one and cannot ask about it"
            )
        return flight


class _Claim:
    """A save's claim on its path, made before it begins: a signal's handler may come in between."""

    def __init__(self, path: str) -> None:
        self.job: _native.SaveJob | None = None
        self.met_own = False
        """Whether another save of this process to the same path was under way meanwhile."""
        other = _at.get(path)
        if other is None or (other.job is not None and other.job.done()):
            _at[path] = self
        else:  # either of them may get the directory
            self.met_own = other.met_own = True


class _Flight:
    """What the thread, the handle and the module share of one save."""

    def __init__(
        self,
        job: _native.SaveJob,
        path: str,
        owners: list[object],
        hold: Hold | None,
        claim: _Claim,
        *,
        is_told: bool,
    ) -> None:
        self.job = job
        self._hold = hold
        if hold is not None:
            hold.follow(lambda: job.staged() or job.done())
        self.path = path
        self.pid = os.getpid()
        self._claim = claim
        claim.job = job
        self.error: BaseException | None = None
        self._done: str | None = None
        self._report: SaveReport | None = None
        # The interpreter waits for the threads that there are when its exit begins.
        self.is_late = not threading.main_thread().is_alive()
        self._owners = owners
        self._is_told = is_told
        self._is_dropped = False
        self._is_logged = False

    def watch(self) -> None:
        """See the save through. The thread's whole life."""
        self.job.wait_staged()
        self._let_go()
        self.job.wait()
        self.settle()

    def _let_go(self) -> None:
        """Let the tensors be changed, and freed."""
        self._owners.clear()
        if self._hold is not None:
            self._hold.end()

    def settle(self) -> None:
        """Take the outcome of a save that is done."""
        self._let_go()
        with _lock:
            if self._done is not None or self.error is not None:
                return
            try:
                self._done = self.job.result()
            except BaseException as error:
                self.error = _others.explained(error, is_own=self._claim.met_own)
            if self.error is None:
                _others.saved(self.path)
                self.told()
            is_lost = self._is_dropped and self.error is not None
        if is_lost:
            self.log()

    def told(self) -> None:
        """Note that the save's failure, if there is one, is nobody's surprise any more."""
        with _lock:
            self._is_told = True
            if self in _unreported:
                _unreported.remove(self)

    def tell(self) -> SaveReport:
        """Return the report of a save that is done, or raises its failure."""
        from ringstow._report import SaveReport

        self.settle()
        self.told()
        if self.error is not None:
            raise self.error.with_traceback(None)
        with _lock:
            if self._report is None:
                assert self._done is not None
                self._report = SaveReport.from_json(self._done)
        return self._report

    def drop(self) -> None:
        """Note that the handle is gone: nobody can ask any more."""
        if self.pid != os.getpid():
            return
        with _lock:
            self._is_dropped = True
            is_lost = self.error is not None
        if is_lost:
            self.log()

    def log(self) -> None:
        """Log the failure, once, unless somebody has been told of it."""
        with _lock:
            if self._is_told or self._is_logged:
                return
            self._is_logged = True
        _log.error("the save to %s failed: %s", self.path, self.error, exc_info=self.error)


def _drop(flight: weakref.ref[_Flight]) -> None:
    dropped = flight()
    if dropped is not None:
        dropped.drop()


def start(
    begin: Callable[[], _native.SaveJob],
    path: str,
    owners: list[object],
    *,
    hold: Hold | None = None,
    is_awaited: bool = False,
) -> SaveHandle:
    """Return a handle to the job that ``begin`` starts, and has a thread watch over it.

    Who awaits the save is told of its failure by the handle, and nobody else is. Where this raises,
    Ctrl-C included, the job has ended: nobody is there to wait before the tensors are changed.
    """
    # Takes a while, and is needed at the end. Not in a thread: a child forked meanwhile would wait
    # for ever for the import to end.
    from ringstow import _report  # noqa: F401

    job: _native.SaveJob | None = None
    flight: _Flight | None = None
    claim = _Claim(path)
    try:
        job = begin()
        flight = _Flight(job, path, owners, hold, claim, is_told=is_awaited)
        handle = SaveHandle(flight)
        thread = threading.Thread(target=flight.watch, name="ringstow-save", daemon=False)
        if not is_awaited:
            with _lock:
                _unreported.append(flight)
        try:
            thread.start()
        except RuntimeError:  # at the interpreter's exit, or too many threads
            if not is_awaited:  # else who waits sees it through
                raise
    except BaseException:  # Ctrl-C besides
        if flight is not None:
            flight.told()
        if job is not None:
            abandon(job)
        raise
    return handle


def abandon(job: _native.SaveJob) -> None:
    """Cancel a job and waits for its end, Ctrl-C or not: till then it reads the tensors."""
    if not job.done():
        job.cancel()
    while not job.done():
        try:
            job.wait()
        except KeyboardInterrupt:
            continue


def log_unreported() -> None:
    """Log the failures of earlier saves that nobody has asked about. Their handles keep them."""
    for flight in list(_unreported):
        if flight.job.done():
            flight.settle()
        if flight.error is not None:
            flight.log()


@atexit.register
def _at_exit() -> None:
    """See to what is still under way, log what nobody asked about, and make the exit fail then.

    Saves that other functions of `atexit` started are waited for. Of all others the exit has waited
    for the threads, unless Ctrl-C cut that short.
    """
    for flight in list(_unreported):
        try:
            if flight.is_late:
                flight.job.wait()
        finally:
            abandon(flight.job)
            flight.settle()
            if flight.error is not None:
                flight.log()
    failed = [flight for flight in _unreported if flight.error is not None]
    if failed:
        _native.fail_exit()
        if sys.stderr is not None:  # besides the log, which may go elsewhere
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            print(
                f"ringstow: exit code 1, since the background save to {failed[0].path}{more} "
                f"failed and nobody asked for its result: {failed[0].error}",
                file=sys.stderr,
            )


def _after_fork() -> None:
    """In a forked child: the parent's saves are not the child's, nor are its threads there."""
    global _lock
    _lock = threading.RLock()
    _unreported.clear()
    forget_after_fork()
    _at.clear()
    _native.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _seconds(timeout: float | None) -> float | None:
    """Return a timeout that every clock can take."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:
        return None
    return max(timeout, 0.0)
