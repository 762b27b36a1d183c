"""Python's garbage collector, which looks at every object there is whenever many are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running.

    It starts whenever so many objects were made, each tensor is a few, and each of its runs looks
    through everything that the process has imported: it took longer than the copy. Loads keep it
    from running to their end, reading included: it would look through what they have half made.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()  # in here: Ctrl-C is raised right after the call
        yield
    finally:
        gc.enable()
