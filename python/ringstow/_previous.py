"""The base of each save of a `CheckpointManager`: the step before."""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Literal

from ringstow import _native
from ringstow._base import Base
from ringstow._errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringstow._catalog_report import Step

_log = logging.getLogger("ringstow")


class Previous:
    """What a manager remembers of the steps that it saved, to link their files."""

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
