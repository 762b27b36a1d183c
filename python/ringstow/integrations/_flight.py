"""The save in flight of one trainer, and the removals that wait for its commit.

A trainer decides which older checkpoint to remove when it saves, which is before a background save
commits. Such a removal waits for the commit, and does not happen if the save fails.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringstow._handle import SaveHandle
    from ringstow.dcp._handle import RanksHandle


class Flight:
    """One save at most, and its removals.

    Args:
        remove: removes the checkpoint at a path, if one is there.
    """

    def __init__(self, remove: Callable[[str], None]) -> None:
        self.handle: SaveHandle | RanksHandle | None = None
        """The save; None if there is none."""
        self._remove = remove
        self._remover: ThreadPoolExecutor | None = None
        self._removals: list[Future[None]] = []

    def remove(self, path: str) -> None:
        """Remove a checkpoint: once the save has committed, else now."""
        if self.handle is None:
            self._remove(path)
            return
        if self._remover is None:
            self._remover = ThreadPoolExecutor(1, thread_name_prefix="ringstow-remove")
        self._removals.append(self._remover.submit(self._remove_after, self.handle, path))

    def end(self) -> BaseException | None:
        """Wait until the save has committed and its removals are done.

        Returns:
            What one of them failed of, once; None if nothing did.
        """
        if self.handle is None:
            return None
        failure = self.handle.exception()  # Ctrl-C here leaves it in flight
        if self._remover is not None:
            self._remover.shutdown(wait=True)
        removals, self._removals = self._removals, []
        self._remover = self.handle = None
        if failure is not None:
            if removals:
                failure.add_note("The older checkpoints that it was to replace are kept.")
            return failure.with_traceback(None)
        return next((error for one in removals if (error := one.exception())), None)

    def _remove_after(self, handle: SaveHandle | RanksHandle, path: str) -> None:
        # Not by the handle's own method: it would count as the caller's, and a failure that no
        # caller ever learns of makes the process exit with 1.
        if Future.exception(handle) is None:
            self._remove(path)
