"""One training's saves in the background, one at a time, each of which ends with a rename."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ringstow import _jobs
from ringstow._config import given
from ringstow._errors import InvalidStateError
from ringstow.integrations import _named

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._handle import SaveHandle
    from ringstow.dcp._handle import RanksHandle

_log = logging.getLogger("ringstow")


def refuse_tiers(config: Config | None) -> None:
    """Refuse settings that name tiers: checkpoints have other names until they are finished.

    Raises:
        InvalidStateError: they do.
    """
    found = given(config)
    if found.tiers:
        raise InvalidStateError(
            f"checkpoints are not copied to Config.tiers ({found.tiers[0]}) here: give a config "
            "with tiers=[], and copy finished ones by ringstow.promote"
        )


def refuse_places(config: Config | None, why: str) -> None:
    """Refuse settings that stripe checkpoints, which could not be renamed, or name tiers.

    Raises:
        InvalidStateError: they do; ``why`` says what else would not work with stripes.
    """
    config = given(config)
    refuse_tiers(config)
    if config.stripe:
        raise InvalidStateError(
            f"checkpoints cannot be striped here: they get their name by a rename{why}. Give a "
            "config with stripe=[]"
        )


class Saves:
    """The saves of one training, one at a time.

    Args:
        framework: for the name of the thread.
        limit: the framework's name of the limit on the number of checkpoints, for the log.
    """

    def __init__(self, framework: str, limit: str) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"ringstow-{framework}")
        self._limit = limit
        self._in_flight: Future[Any] | None = None
        self._failure: _jobs.Failure | None = None

    def end(self) -> BaseException | None:
        """Wait until the save in flight has its name, and older checkpoints are removed.

        Returns:
            What that save failed of; only the first time.
        """
        if self._in_flight is None:
            return None
        error = self._in_flight.exception()  # after Ctrl-C here, the save goes on
        self._in_flight = None
        failure, self._failure = self._failure, None
        if failure in _jobs.unreported:
            _jobs.unreported.remove(failure)
        return None if error is None else error.with_traceback(None)

    def ended(self) -> BaseException | None:
        """Wait as `end` does, and return what the save failed of, which `end` still returns."""
        return None if self._in_flight is None else self._in_flight.exception()

    def follow(self, handle: Future[Any]) -> None:
        """Let `end` wait for a save that another rank completes."""
        self._in_flight = handle

    def start(
        self,
        handle: SaveHandle | RanksHandle,
        part: str,
        final: str,
        *,
        seal: Callable[[], None],
        stale: Callable[[], Iterable[str]],
        may_replace: Callable[[str], None] | None = None,
        announce: Callable[[], None] | None = None,
        is_alone: bool = True,
    ) -> None:
        """Complete a save once it has committed.

        Args:
            handle: the save into the hidden directory.
            part: the hidden directory, by `_named.prepare`.
            final: the path that it gets.
            seal: adds the last files to the hidden directory, after the commit.
            stale: returns the older checkpoints to remove, once this one is complete.
            may_replace: raises if what has the name by then must stay.
            announce: called at the end; what it raises counts as the save's failure.
            is_alone: no other rank writes there, so a failure can remove the hidden directory.
        """

        def commit() -> None:
            try:
                handle.result()
                seal()
                _named.complete(part, final, may_replace)
            except BaseException:
                if is_alone:
                    shutil.rmtree(part, ignore_errors=True)
                raise

        def finish() -> None:
            commit()
            self._remove(stale)
            if announce is not None:
                announce()

        self.run(final, finish)

    def run(self, final: str, finish: Callable[[], None]) -> None:
        """Complete a save by a function, in the background.

        Args:
            final: the checkpoint's path.
            finish: the function; what it raises is the save's failure.
        """

        def work() -> None:
            try:
                finish()
            except BaseException as error:
                # Until `end` returns it: the exit reports what nobody has asked about.
                self._failure = _jobs.Failure(final, error)
                _jobs.unreported.append(self._failure)
                raise

        self._in_flight = self._worker.submit(work)

    def _remove(self, stale: Callable[[], Iterable[str]]) -> None:
        """Remove older checkpoints. The save has succeeded, whatever becomes of them."""
        try:
            for path in stale():
                _named.remove(path, self._limit)
        except OSError as error:
            _log.warning("checkpoints over %s could not be listed: %s", self._limit, error)
