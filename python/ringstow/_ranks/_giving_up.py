"""A rank that fails or is cancelled tells the others, which stop writing.

It notes that in the checkpoint's directory: no rank receives messages while it writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from ringstow import _native
from ringstow._core._errors import SaveCancelledError
from ringstow._core._waiting import patiently

# How often a rank that writes looks for the others' notes.
_LOOK_S = 0.5


class StoppedError(SaveCancelledError):
    """This rank has stopped writing, since another rank had given up: not the save's failure."""


@contextlib.contextmanager
def telling(path: str, rank: int) -> Iterator[None]:
    """Tell the ranks that write to the same directory if this rank's write fails."""
    try:
        yield
    except StoppedError:
        raise
    except BaseException as error:  # Ctrl-C, too
        _native.give_up(path, rank, f"{type(error).__name__}: {error}")
        raise


def wait_staged(job: _native.SaveJob, path: str, rank: int) -> None:
    """Wait until this rank's tensors are copied, or its write has failed.

    Args:
        job: the write.
        path: the checkpoint's directory.
        rank: this rank, for the log.

    Raises:
        StoppedError: another rank has given up; this rank has stopped.
    """
    what = f"rank {rank} waits for the save to {path}, which has not copied all tensors"
    patiently(lambda seconds: _wait(job, job.wait_staged, path, seconds), what)


def wait(job: _native.SaveJob, path: str, rank: int) -> None:
    """Wait for the end of this rank's write; see `wait_staged`."""
    what = f"rank {rank} waits for the save to {path}, which is not durable"
    patiently(lambda seconds: _wait(job, job.wait, path, seconds), what)


def _wait(
    job: _native.SaveJob, step: Callable[[float], bool], path: str, seconds: float | None
) -> bool:
    end = None if seconds is None else time.monotonic() + seconds
    while not step(_LOOK_S):
        if why := _native.given_up(path):
            _stop(job, path, why)
            return True
        if end is not None and time.monotonic() >= end:
            return False
    return True


def _stop(job: _native.SaveJob, path: str, why: str) -> None:
    job.cancel()
    job.wait()
    try:
        job.result()
    except SaveCancelledError as error:
        raise StoppedError(f"the save to {path} was stopped: {why}", path=path) from error
