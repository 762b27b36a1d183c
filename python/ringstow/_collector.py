"""Python's garbage collector, which visits every object whenever many are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running.

    It starts after a number of new objects (each tensor is a few), and each run visits everything
    that the process has imported: that took longer than the copy. Loads pause it to their end,
    reading included, since it would visit what they have half made.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()  # in here: Ctrl-C is raised right after the call
        yield
    finally:
        gc.enable()
