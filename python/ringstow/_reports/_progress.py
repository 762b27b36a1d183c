"""Progress bars on stderr, by tqdm if it is installed."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from ringstow import _native

# Work that ends within this time shows no bar.
_PATIENCE_S = 1.0


def is_allowed() -> bool:
    """Return whether progress may be shown at all: unless ``RINGSTOW_PROGRESS=0``."""
    return sys.stderr is not None and _native.shows_progress()


def is_wanted() -> bool:
    """Return whether a bar may be shown: on a terminal, unless ``RINGSTOW_PROGRESS=0``."""
    return is_allowed() and sys.stderr.isatty()


def tqdm() -> Any:
    """Return tqdm's class, without its monitor thread; None if not installed."""
    try:
        from tqdm import tqdm as kind  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None

    class Bar(kind):  # type: ignore[misc,unused-ignore]
        monitor_interval = 0

    return Bar


class Progress:
    """Shows a bar once the work within has taken a second, and clears it at the end.

    Calls with the bytes done and their total move it. Shows nothing outside of the main thread: a
    signal handler may wait for another thread while it holds tqdm's lock. Shows nothing on ranks
    other than the first, since ranks share a terminal.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._since = time.monotonic()
        self._is_on = (
            is_wanted()
            and threading.current_thread() is threading.main_thread()
            and os.environ.get("RANK", "0") == "0"
        )

    @property
    def advance(self) -> Progress | None:
        """The function to call with the bytes done and their total; None if there is no bar."""
        return self if self._is_on else None

    def __call__(self, done: int, total: int) -> None:
        """Move the bar. An error, for example of a closed terminal, ends the bar."""
        if not self._is_on or time.monotonic() - self._since < _PATIENCE_S:
            return
        try:
            if self._bar is None:
                self._begin(total)
            if self._bar is not None:
                self._bar.total = total
                self._bar.update(done - self._bar.n)
        except Exception:
            self._is_on = False

    def _begin(self, total: int) -> None:
        kind = tqdm()
        if kind is None:
            self._is_on = False
        else:
            self._bar = kind(
                desc=self._what,
                total=total or None,  # not known yet
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            try:
                bar.close()
            except Exception:
                self._is_on = False
