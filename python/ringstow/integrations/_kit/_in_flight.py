"""The save in progress of one training run, and the steps after its commit: rename, removals.

A trainer decides which older checkpoint to remove when it saves, before a background save commits.
Such a removal waits for the commit, and does not happen if the save fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ringstow._core._errors import TornSaveError
from ringstow._saving import _jobs
from ringstow.integrations import _rename_when_complete

_log = logging.getLogger("ringstow")


def _nothing(*_: object) -> None:
    pass


class Publication(NamedTuple):
    """The steps that end a save into a hidden directory."""

    part: str
    """The hidden directory that `_rename_when_complete.prepare` made."""
    final: str
    """The final path."""
    seal: Callable[[], None] = _nothing
    """Adds the last files to the hidden directory, after the commit."""
    stale: Callable[[], Iterable[str]] = tuple
    """Returns the older checkpoints to remove after this one is complete."""
    limit: str = "a limit"
    """The framework's name of the limit on the number of checkpoints, for the log."""
    may_replace: Callable[[str], None] | None = None
    """Raises if the path's current owner must stay."""
    announce: Callable[[], None] = _nothing
    """Called at the end; its exception counts as the save's failure."""
    is_alone: bool = True
    """Whether no other rank writes there, so that a failure can remove the hidden directory."""


class InFlight:
    """At most one save in progress.

    Args:
        remove: removes the checkpoint at a path, if it exists.
        torn: the remedy to add to a failure for tensors that were changed too early.
    """

    def __init__(self, remove: Callable[[str], None] = _nothing, torn: str = "") -> None:
        self.handle: Future[Any] | None = None
        """The save with the steps after it; None if there is none."""
        self._remove_now = remove
        self._torn = torn
        self._worker: ThreadPoolExecutor | None = None
        self._removals: list[Future[None]] = []
        self._failure: _jobs.Failure | None = None

    def run(self, path: str, finish: Callable[[], None]) -> None:
        """Complete a save by a function, in the background; its exception is the save's failure."""

        def work() -> None:
            try:
                finish()
            except BaseException as error:
                # Until `end` returns it: the exit reports failures that have not been reported.
                self._failure = _jobs.Failure(path, error)
                _jobs.unreported.append(self._failure)
                raise

        self.handle = self._submit(work)

    def publish(self, handle: Future[Any], how: Publication) -> None:
        """Rename a save once it has committed, in the background."""

        def finish() -> None:
            with _rename_when_complete.discarding(how.part, how.final, removes=how.is_alone):
                handle.result()
                how.seal()
                _rename_when_complete.complete(how.part, how.final, how.may_replace)
            try:  # the save has succeeded even if removals fail
                for path in how.stale():
                    _rename_when_complete.remove(path, how.limit)
            except OSError as error:
                _log.warning("checkpoints over %s could not be listed: %s", how.limit, error)
            how.announce()

        self.run(how.final, finish)

    def remove(self, path: str) -> None:
        """Remove a checkpoint: after the commit of a save in progress, otherwise now."""
        if self.handle is None:
            self._remove_now(path)
        else:
            self._removals.append(self._submit(self._remove_after, self.handle, path))

    def failure(self) -> BaseException | None:
        """Wait for the save, and return its failure, which `end` still returns."""
        return None if self.handle is None else self.handle.exception()

    def end(self) -> BaseException | None:
        """Wait until the save has committed and the steps after it are done.

        Returns:
            The failure of one of them, once; None if nothing failed.
        """
        if self.handle is None:
            return None
        failure = self.handle.exception()  # Ctrl-C here leaves the save in progress
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        removals, self._removals = self._removals, []
        reported, self._failure = self._failure, None
        self._worker = self.handle = None
        if reported in _jobs.unreported:
            _jobs.unreported.remove(reported)
        if failure is None:
            return next((error for one in removals if (error := one.exception())), None)
        if removals:
            failure.add_note("The older checkpoints that it was to replace are kept.")
        if self._torn and any(
            isinstance(one, TornSaveError) for one in (failure, failure.__cause__)
        ):
            failure.add_note(self._torn)
        return failure.with_traceback(None)

    def _submit(self, work: Callable[..., None], *args: object) -> Future[None]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="ringstow-after-save")
        return self._worker.submit(work, *args)

    def _remove_after(self, handle: Future[Any], path: str) -> None:
        # Not by the handle's own method, which would count as a report to the caller; an unreported
        # failure must make the process exit with 1.
        if Future.exception(handle) is None:
            self._remove_now(path)
