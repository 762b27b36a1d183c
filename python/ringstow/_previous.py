"""The base of each save of a `CheckpointManager`: the step before."""

from __future__ import annotations

import logging
import operator
import threading
from typing import TYPE_CHECKING, Literal

from ringstow._base import Base
from ringstow._errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringstow._catalog_report import Step

_log = logging.getLogger("ringstow")


class Previous:
    """What a manager remembers of the steps that it saved, to link their files."""

    def __init__(self, full_every: int | None, newest: Callable[[], Step | None]) -> None:
        self._full_every = full_every
        self._newest = newest
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too
        self._last: str | None = None
        self._linked = 0
        """Saves since the last one that shared no file."""

    def base(self) -> Base:
        """Return the base of the next save."""
        with self._lock:
            last, is_full = self._last, self._is_full()
        return Base(last or self._found(), optional=True, rewrite=is_full)

    def saved(self, path: str) -> None:
        """Remember a step that was committed."""
        with self._lock:
            self._linked = 1 if self._is_full() else self._linked + 1
            self._last = path

    def restored(self, path: str) -> None:
        """Remember the step that was restored: newer ones may be damaged."""
        with self._lock:
            self._last = path

    def _is_full(self) -> bool:
        return self._full_every is not None and self._linked >= self._full_every

    def _found(self) -> str | None:
        """Return the newest step that an earlier process has saved."""
        try:
            newest = self._newest()
        except (Error, OSError) as error:  # a save must not fail because of an older step
            _log.warning("no earlier step can be the base of this save: %s", error)
            return None
        return None if newest is None else newest.path


def previous(
    base: Literal["previous"] | None, full_every: int | None, newest: Callable[[], Step | None]
) -> Previous | None:
    """Return the bases of a manager's saves; None if it was made without.

    Raises:
        TypeError, ValueError: the arguments can't be used.
    """
    if base is None:
        if full_every is not None:
            raise ValueError('base_full_every needs base="previous"')
        return None
    if base != "previous":
        raise ValueError(f'base is "previous" or None, not {base!r}')
    if full_every is not None and (isinstance(full_every, bool) or operator.index(full_every) < 1):
        raise ValueError(f"base_full_every is a number of saves from 1, not {full_every!r}")
    return Previous(full_every, newest)
