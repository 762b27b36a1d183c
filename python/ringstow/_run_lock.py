"""One run, one job: from its first save on, a manager keeps other managers out of its directory."""

from __future__ import annotations

import gc

from ringstow import _native, _others
from ringstow._errors import BusyError


class RunLock:
    """The lock of a run. Whoever reads, and a save without a manager, needs none."""

    def __init__(self, root: str) -> None:
        """Name the run."""
        self._root = root
        self._held: _native.RunLock | None = None

    def take(self) -> None:
        """Keep other managers from saving there.

        Raises:
            BusyError: another one does, in this process or in another; says which.
            InvalidStateError: another rank of this job has, and there is no process group.
            OSError: the directory cannot be made, or its lock file not be opened.
        """
        if _native.RunLock.is_own(self._root):
            gc.collect()  # a manager that was dropped without `close` may wait for it
        try:
            self._held = _native.RunLock(self._root)
        except BusyError as error:
            raise _others.explained(error, is_own=False) from None
        try:
            _others.refuse_run_of_other_ranks(self._root)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other managers save there."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
