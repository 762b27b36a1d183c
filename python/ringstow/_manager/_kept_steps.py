"""Steps that a program keeps until it releases them: no rule removes or slims them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstow import _native

if TYPE_CHECKING:
    from ringstow._manager._one_process import Side
    from ringstow._manager._run_directory import Run


class KeptSteps:
    """The kept steps of a run. All ranks call each method."""

    def __init__(self, side: Side[Any], run: Run) -> None:
        """Store the ranks, and the steps of the run's directory."""
        self._side = side
        self._run = run

    def keep(self, step: int) -> None:
        """See `CheckpointManager.keep`."""
        self._change(lambda: self._run.named(step)[0].path, _native.pin)

    def release(self, step: int) -> bool:
        """See `CheckpointManager.release`."""

        def find() -> str:
            return _native.kept(self._run.root, step) or self._run.named(step)[0].path

        return self._change(find, _native.unpin)

    def _change(self, find: Callable[[], str], change: Callable[[str], bool | None]) -> bool:
        """Keep or release a step; return whether it was kept before."""

        def look() -> tuple[str, bool]:
            path = find()
            return path, os.path.basename(path) in _native.pinned(self._run.root)

        path, was_kept = self._side.first(look)

        def changed() -> None:
            if self._side.leads:
                change(path)

        self._side.each(changed)
        return was_kept
