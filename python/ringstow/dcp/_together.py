"""What the ranks of a group tell each other, so that no rank decides or fails alone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from ringstow._errors import Error
from ringstow.dcp._errors import survives

T = TypeVar("T")

_log = logging.getLogger("ringstow")

# After this time a rank says that it waits for the others.
_PATIENCE_S = 60.0


def sendable(error: BaseException) -> BaseException:
    """Return an error that another rank can receive: this one, or one of its text."""
    return error if survives(error) else Error(f"{type(error).__name__}: {error}")


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with _patient(group):
        dist.all_gather_object(values, value, group=group)
    return values


def from_first(look: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what a function returns on the group's first rank, on all ranks.

    Raises:
        Exception: what it raises there, on all ranks.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    answer: list[Any] = [None, None]
    if dist.get_rank() == first:
        try:
            answer[0] = look()
        except Exception as error:  # the others must not wait for this rank
            answer[1] = sendable(error)
    with _patient(group):
        dist.broadcast_object_list(answer, src=first, group=group)
    found, failure = answer
    if failure is not None:
        raise failure
    result: T = found
    return result


def each(call: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what a function returns on this rank, once it has returned on all ranks.

    Raises:
        Exception: what it raises on this rank.
        Error: what it raises on another, with that rank.
    """
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(call())
    except Exception as caught:
        error = caught
    agree(error, group)
    return results[0]


def agree(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Fail on all ranks if one of them has failed.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's, with its rank.
    """
    try:
        errors = gathered(None if error is None else sendable(error), group)
    except BaseException:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise Error(f"rank {rank} failed: {type(other).__name__}: {other}") from other


@contextlib.contextmanager
def _patient(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Log a warning if the other ranks are late."""
    ranks = f"{dist.get_rank(group)} of {dist.get_world_size(group)}"
    text = "rank %s has waited %.0f s for the other ranks: all of them must make this call"
    timer = threading.Timer(_PATIENCE_S, _log.warning, (text, ranks, _PATIENCE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
