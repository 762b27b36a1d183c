"""What the handles of background saves know of the copies after the commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from ringstow._errors import InvalidStateError, NotDurableError
from ringstow._report import SaveReport


class Copied(Future[SaveReport]):
    """A save in the background, and the copies that follow its commit."""

    _copies: Future[bool] | None = None
    """Becomes whether all copies are there; None if this process copies nothing."""
    skipped: bool = False
    """Whether the step was not saved, by a manager's ``on_busy="skip"``."""
    _explain: Callable[[BaseException], None] | None = None
    _error: BaseException | None = None

    def set_exception(self, exception: BaseException | None) -> None:
        """End with a failure, once it is explained."""
        self._error = exception
        if self._explain is not None and exception is not None:
            self._explain(exception)
        super().set_exception(exception)

    def _explained_by(self, explain: Callable[[BaseException], None]) -> None:
        """Have a failure explained before anybody learns of it, also one that is there already."""
        self._explain = explain
        if self._error is not None:
            explain(self._error)

    @property
    def path(self) -> str:
        """The checkpoint's directory."""
        raise NotImplementedError

    def promoted(self) -> bool:
        """Return whether the checkpoint is on all tiers: False before that, and after a failure."""
        copies = self._copies if self.done() else None
        return copies is not None and copies.done() and not copies.exception() and copies.result()

    def wait_promoted(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint is committed, and is on all tiers.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            True once it is there. False if the time ran out, or if a newer step was there to copy
            before the copy of this one began.

        Raises:
            Exception: what the save failed of, or the copy.
            InvalidStateError: no tiers are named, or another rank copies: of several the first one
                does.
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
                raise  # it is what the save or the copy failed of
            return False

    # Both ask the future itself: a handle's own `exception` would count as asking for a failure.

    def _is_committed(self) -> bool:
        """Return whether the checkpoint is committed."""
        return Future.done(self) and Future.exception(self) is None

    def _may_be_lost(self) -> bool:
        """Return whether the checkpoint is committed, and a crash may undo that."""
        return Future.done(self) and isinstance(Future.exception(self), NotDurableError)
