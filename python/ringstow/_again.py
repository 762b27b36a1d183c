"""Begins again with a checkpoint that another save replaced while it was being read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ringstow._errors import ReplacedCheckpointError

_T = TypeVar("_T")

# Each time a whole save has to come in between.
_ATTEMPTS = 100

_log = logging.getLogger("ringstow")


def while_replaced(attempt: Callable[[], _T]) -> _T:
    """Call something that opens a checkpoint and loads it; again if it was replaced meanwhile.

    Raises:
        ReplacedCheckpointError: it was, every time.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except ReplacedCheckpointError as error:
            _log.debug("beginning again: %s", error)
    return attempt()
