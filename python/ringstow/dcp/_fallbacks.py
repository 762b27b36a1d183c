"""Fallbacks of this side, told once in a process' life. Those of the core it tells by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ringstow._report import Fallback

_log = logging.getLogger("ringstow")

_told: set[Fallback] = set()


def warn_once(fallbacks: Iterable[Fallback]) -> None:
    """Log each fallback that is new."""
    for fallback in fallbacks:
        if fallback not in _told:
            _told.add(fallback)
            _log.warning(
                "%s instead of %s: %s; %s",
                fallback.got,
                fallback.wanted,
                fallback.reason,
                fallback.remedy,
            )
