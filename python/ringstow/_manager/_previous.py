"""The base of each save of a `CheckpointManager`: the previous step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._errors import Error
from ringstow._saving._base import Base

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringstow._reports._checkpoint_reports import Step

_log = logging.getLogger("ringstow")


class PreviousSteps:
    """Remembers the steps that a manager has saved, so that the next save can link their files."""

    def __init__(self, full_every: int | None, newest: Callable[[], Step | None]) -> None:
        self._last = _native.Previous(full_every)
        self._newest = newest
        self.saved = self._last.saved
        self.restored = self._last.restored

    def base(self) -> Base:
        """Return the base of the next save."""
        last, is_full = self._last.next()
        return Base(last or self._found(), optional=True, rewrite=is_full)

    def _found(self) -> str | None:
        """Return the newest step that an earlier process has saved."""
        try:
            newest = self._newest()
        except (Error, OSError) as error:  # a save must not fail because of an older step
            _log.warning("no earlier step can be the base of this save: %s", error)
            return None
        return None if newest is None else newest.path
