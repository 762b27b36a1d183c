"""What the ranks of a group tell each other, so that no rank decides or fails alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ringstow import _patience
from ringstow._errors import Error, InvalidStateError, SaveCancelledError
from ringstow.dcp._errors import survives

T = TypeVar("T")


def sendable(error: BaseException) -> BaseException:
    """Return an error that another rank can receive: this one, or one of its text."""
    return error if survives(error) else Error(f"{type(error).__name__}: {error}")


def lives(group: dist.ProcessGroup | None) -> bool:
    """Return whether nobody has destroyed the group."""
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except Exception:  # of a process group that was destroyed
        return False


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value."""
    with patient(group):
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
    return values


def from_first(look: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what a function returns on the group's first rank; see `from_rank`."""
    return from_rank(0, look, group)


def from_rank(rank: int, look: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what a function returns on one rank of the group, on all ranks.

    Raises:
        Exception: what it raises there, on all ranks.
        Error: that rank was interrupted; the interrupt itself is raised there.
    """
    with _needing(group):
        source = rank if group is None else dist.get_global_rank(group, rank)
        is_source = dist.get_rank() == source
    answer: list[Any] = [None, None]
    interrupt: BaseException | None = None
    if is_source:
        try:
            answer[0] = look()
        except Exception as error:  # the others must not wait for this rank
            answer[1] = sendable(error)
        except BaseException as error:  # Ctrl-C, which is this rank's alone
            interrupt = error
            name = "the first rank" if rank == 0 else f"rank {rank}"
            answer[1] = Error(f"{name} failed: {type(error).__name__}: {error}")
    with patient(group):
        dist.broadcast_object_list(answer, src=source, group=group)
    found, failure = answer
    if interrupt is not None:
        raise interrupt
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
    error: BaseException | None = None
    try:
        results.append(call())
    except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
        error = caught
    agree(error, group)
    return results[0]


def agree(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Fail on all ranks if one of them has failed.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's, with its rank.
    """
    agreed(error, None, group)


class Team:
    """The ranks of a group, or one process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        """Name the ranks.

        Args:
            group: the group; None means all ranks, or this process if there is no group at all.
            alone: this process is the only rank, whatever groups there are.
        """
        self.group = group
        self._is_alone = alone or not dist.is_initialized()
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        """This process's rank in the group; -1 if it is not in it."""
        self.size = 1 if self._is_alone else dist.get_world_size(group)

    @property
    def device(self) -> torch.device:
        """The device whose memory the back end sends: NCCL sends that of GPUs only."""
        is_nccl = not self._is_alone and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda" if is_nccl else "cpu")

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default group of a rank of this one."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank, and return what all return; fail on all if one fails.

        Raises:
            BaseException: this rank's own error.
            Error: another rank's, with its rank.
        """
        return [work()] if self._is_alone else together(work, self.group)


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Do something on every rank, and return what all return; fail on all if one fails.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's, with its rank.
    """
    done: list[T] = []
    error: BaseException | None = None
    try:
        done.append(work())
    except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
        error = caught
    return [value for values in agreed(error, done, group) for value in values]


def agreed(error: BaseException | None, value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value, or fail on all ranks if one of them has failed.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's, with its rank.
    """
    said = told(error, value, group)
    if error is not None:
        raise error
    raise_first(other for _, other in said)
    return [one for one, _ in said]


def told(
    error: BaseException | None, value: T, group: dist.ProcessGroup | None
) -> list[tuple[T, BaseException | None]]:
    """Return every rank's value, and why it has failed.

    Raises:
        BaseException: this rank's own error, if the others cannot be asked.
    """
    try:
        return gathered((value, None if error is None else sendable(error)), group)
    except BaseException:
        if error is not None:
            raise error from None
        raise


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise what the first rank that failed has met, if one has.

    Raises:
        Error: names the rank.
        SaveCancelledError: that rank has cancelled the save.
    """
    for rank, error in enumerate(errors):
        if isinstance(error, SaveCancelledError):
            raise SaveCancelledError(
                f"rank {rank} has cancelled the save: {error}", path=error.path
            ) from error
        if error is not None:
            raise Error(f"rank {rank} failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def patient(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Log a warning if the other ranks are late.

    Raises:
        InvalidStateError: somebody has destroyed the group.
    """
    with _needing(group):
        ranks = f"{dist.get_rank(group)} of {dist.get_world_size(group)}"
        with _patience.patient(
            f"rank {ranks} waits for the other ranks, all of which must make this call"
        ):
            yield


@contextlib.contextmanager
def _needing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say in ringstow's words what fails because the group is gone."""
    try:
        yield
    except Exception as error:
        if lives(group):
            raise
        raise InvalidStateError(
            "the process group was destroyed while a save, load or copy needed it: call the "
            "handle's result(), or close the manager, before destroy_process_group()"
        ) from error


def explained(failure: BaseException, what: str) -> BaseException:
    """Return why ranks have failed together, as an Exception: DCP's CheckpointException is none.

    Args:
        failure: any failure; all but a CheckpointException are returned as they are.
        what: a sentence that says what has failed.

    Returns:
        This rank's own error if it has failed; otherwise one that names the first rank that has.
    """
    if not isinstance(failure, CheckpointException):
        return failure
    failures = {rank: error for rank, (error, _) in failure.failures.items()}
    error = failures.get(dist.get_rank()) if dist.is_initialized() else None
    if error is None:
        rank, first = min(failures.items())
        error = Error(f"rank {rank} failed: {type(first).__name__}: {first}")
    error.add_note(what)
    return error
