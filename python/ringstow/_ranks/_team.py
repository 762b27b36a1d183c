"""Communication of a team's ranks, so that no rank decides or fails alone.

Imports no torch: one process has no other ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ringstow import _native
from ringstow._core._errors import Error, InvalidStateError, NoCheckpointError, SaveCancelledError
from ringstow._ranks import _concurrent_saves, _shared_fs_lag
from ringstow._ranks._giving_up import StoppedError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Team:
    """One process alone; `Group` is several ranks. All ranks call each method at the same time."""

    group: dist.ProcessGroup | None = None
    rank = 0
    """This process's rank in the team; -1 if it is not in it."""
    size = 1
    doing = ""
    """What this rank and the others are doing, with its path: a wait that takes long logs it."""

    @property
    def device(self) -> str:
        """The type of device whose memory the ranks can send: NCCL sends only GPU memory."""
        return "cpu"

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the directory and commits for all."""
        return self.rank == 0

    # Methods that a group overrides.

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, on all ranks."""
        return [value]

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value, on the first rank; nothing on the others."""
        return [value]

    def from_rank(self, rank: int, look: Callable[[], T]) -> T:
        """Call a function on one rank, and return its result on all ranks.

        Raises:
            Exception: the function's error, on all ranks.
            Error: that rank was interrupted; the interrupt itself is raised there.
        """
        return look()

    def begin_max(self, values: list[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of all ranks' numbers, place by place.

        Returns:
            A function that waits for them, to be called once.
        """
        return lambda: values

    def prepare_end(self) -> None:
        """Prepare to name ranks that are lost in the last save of a training."""

    def begin_end(self, left_s: float | None) -> None:
        """Note that the next save is the last one.

        From now on a call fails in time if other ranks end or hang, and names them.

        Args:
            left_s: the seconds for it; None for no limit.
        """

    def finish_end(self) -> None:
        """End what `prepare_end` has made."""

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default process group of a rank of this team."""
        return rank

    def close(self) -> None:
        """End the groups that were made for the team."""

    # Methods built on those above.

    def from_first(self, look: Callable[[], T]) -> T:
        """Call a function on the first rank, and return its result on all ranks."""
        return self.from_rank(0, look)

    def told(self, error: BaseException | None, value: T) -> list[tuple[T, BaseException | None]]:
        """Return every rank's value and error.

        Raises:
            BaseException: this rank's own error, if the others cannot be reached.
        """
        try:
            return self.gathered((value, None if error is None else sendable(error)))
        except BaseException:
            if error is not None:
                raise error from None
            raise

    def agreed(self, error: BaseException | None, value: T) -> list[T]:
        """Return every rank's value, or fail on all ranks if one of them has failed.

        Raises:
            BaseException: this rank's own error.
            Error: another rank's error, with its number.
        """
        said = self.told(error, value)
        if error is not None:
            raise error
        raise_first(other for _, other in said)
        return [one for one, _ in said]

    def agree(self, error: BaseException | None) -> None:
        """Fail on all ranks if one of them has failed; see `agreed`."""
        self.agreed(error, None)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return all results; fail on all if one fails.

        Raises:
            BaseException: this rank's own error.
            Error: another rank's error, with its number.
        """
        done: list[T] = []
        error: BaseException | None = None
        try:
            done.append(work())
        except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
            error = caught
        return [value for values in self.agreed(error, done) for value in values]

    def each(self, work: Callable[[], T]) -> T:
        """Call a function on every rank; return this rank's result once all have ended.

        Raises:
            Exception: the function's error on this rank.
            Error: the function's error on another rank, with its number.
        """
        done: list[T] = []
        self.together(lambda: done.append(work()))
        return done[0]

    def meet(self, call: tuple[object, ...], failure: BaseException | None, said: T) -> list[T]:
        """Return each rank's message, if all make the same call and the previous save succeeded.

        Args:
            call: the name of the method, and its arguments.
            failure: the previous save's failure on this rank.
            said: this rank's message.

        Raises:
            BaseException: the failure of this rank.
            Error: the failure of another rank, with its number.
            InvalidStateError: the ranks do not make the same call.
        """
        all_said = self.told(failure, (call, said))
        if failure is not None:
            raise failure
        for rank, (_, other) in enumerate(all_said):
            if other is not None:
                raise Error(f"the previous save failed on rank {rank}: {other}") from other
        refuse_different([other for (other, _), _ in all_said])
        return [one for (_, one), _ in all_said]

    def see(self, path: str, *, is_found: bool = False) -> None:
        """Wait until all ranks see a checkpoint: a network file system may show it late.

        Args:
            path: the checkpoint's directory.
            is_found: whether a rank has found it; if false and no rank sees it, the ranks do not
                wait.

        Raises:
            NoCheckpointError: some ranks do not see a checkpoint that another rank sees or has
                found.
        """
        is_seen = sees(path)
        seen = self.gathered(is_seen)
        if all(seen) or not (is_found or any(seen)):
            return
        seen = self.gathered(is_seen or _wait_for(path))
        blind = [str(rank) for rank, has_seen in enumerate(seen) if not has_seen]
        if blind:
            raise NoCheckpointError(
                f"{path} was found, but rank(s) {', '.join(blind)} did not see it for "
                f"{_shared_fs_lag.SEEN_S:.0f} s: do all ranks use one shared file system, mounted "
                "at the same path?",
                path=path,
            )


def refuse_different(calls: list[tuple[object, ...]], hint: str = "") -> None:
    """Raise InvalidStateError if the ranks make different calls, each a name and arguments."""
    if any(call != calls[0] for call in calls):
        told = "; ".join(
            f"rank {rank}: {name}{arguments}" for rank, (name, *arguments) in enumerate(calls)
        )
        raise InvalidStateError(
            f"the ranks do not make the same call: {told}. Call it on every rank, in the same "
            f"order and with the same arguments{hint}"
        )


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the error of the first rank that failed, if any; not of one that stopped for another.

    Raises:
        Error: names the rank.
        SaveCancelledError: that rank has cancelled the save.
    """
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    for rank, error in sorted(failed, key=lambda one: isinstance(one[1], StoppedError)):
        if isinstance(error, SaveCancelledError):
            raise SaveCancelledError(
                f"rank {rank} has cancelled the save: {error}", path=error.path
            ) from error
        raise Error(f"rank {rank} failed: {type(error).__name__}: {error}") from error


def sendable(error: BaseException) -> BaseException:
    """Return an error that another rank can receive: this one, or an `Error` with its text."""
    return error if survives(error) else Error(f"{type(error).__name__}: {error}")


def survives(error: BaseException) -> bool:
    """Return whether another process would receive the same error."""
    import pickle  # takes a while, and only a failure needs it

    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def sees(path: str) -> bool:
    """Return whether this rank sees a checkpoint, or its rank checkpoints."""
    _shared_fs_lag.look_again(path)
    try:
        names = os.listdir(path)
    except OSError:
        return False
    # Ignores `rank00000-0.safetensors.part`: a save that is not committed.
    is_torchs = ".metadata" in names and any(name.endswith(".distcp") for name in names)
    has_parts = any(map(_concurrent_saves.RANK_DIR.fullmatch, names))
    return "manifest.json" in names or has_parts or is_torchs


def _wait_for(path: str) -> bool:
    """Wait until this rank sees a checkpoint; return whether it does."""
    until = time.monotonic() + _shared_fs_lag.SEEN_S
    while not sees(path):
        was_removed = _native.has_gone(path) and _native.shared_file_system(path) is None
        if was_removed or time.monotonic() >= until:
            return False
        time.sleep(_shared_fs_lag.POLL_S)
    return True
