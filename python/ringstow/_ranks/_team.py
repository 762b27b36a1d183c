"""What the ranks of a team tell each other, so that no rank decides or fails alone.

Imports no torch: one process meets nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ringstow import _native
from ringstow._core._errors import Error, InvalidStateError, NoCheckpointError, SaveCancelledError
from ringstow._ranks import _concurrent_saves, _shared_fs_lag

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Team:
    """One process alone; `Group` is several ranks. All ranks call each method at the same time."""

    group: dist.ProcessGroup | None = None
    rank = 0
    """This process's rank in the team; -1 if it is not in it."""
    size = 1

    @property
    def device(self) -> str:
        """The kind of the device whose memory the ranks can send: NCCL sends that of GPUs only."""
        return "cpu"

    @property
    def is_first(self) -> bool:
        """Whether this rank looks and commits for all."""
        return self.rank == 0

    # What a group does in another way.

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, on all ranks."""
        return [value]

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value, on the first rank; nothing on the others."""
        return [value]

    def from_rank(self, rank: int, look: Callable[[], T]) -> T:
        """Return what a function returns on one rank, on all ranks.

        Raises:
            Exception: what it raises there, on all ranks.
            Error: that rank was interrupted; the interrupt itself is raised there.
        """
        return look()

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default process group of a rank of this team."""
        return rank

    def close(self) -> None:
        """End what was made for the team."""

    # What follows from that.

    def from_first(self, look: Callable[[], T]) -> T:
        """Return what a function returns on the first rank, as `from_rank` does."""
        return self.from_rank(0, look)

    def told(self, error: BaseException | None, value: T) -> list[tuple[T, BaseException | None]]:
        """Return every rank's value, and why it has failed.

        Raises:
            BaseException: this rank's own error, if the others cannot be asked.
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
            Error: another rank's, with its rank.
        """
        said = self.told(error, value)
        if error is not None:
            raise error
        raise_first(other for _, other in said)
        return [one for one, _ in said]

    def agree(self, error: BaseException | None) -> None:
        """Fail on all ranks if one of them has failed, as `agreed` does."""
        self.agreed(error, None)

    def together(self, work: Callable[[], T]) -> list[T]:
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
        return [value for values in self.agreed(error, done) for value in values]

    def each(self, work: Callable[[], T]) -> T:
        """Return what a function returns on this rank, once it has returned on all ranks.

        Raises:
            Exception: what it raises on this rank.
            Error: what it raises on another, with that rank.
        """
        done: list[T] = []
        self.together(lambda: done.append(work()))
        return done[0]

    def meet(self, call: tuple[object, ...], failure: BaseException | None, said: T) -> list[T]:
        """Return what each rank says, once all make the same call and the save before went well.

        Args:
            call: the name of the method, and its arguments.
            failure: what the save before failed of on this rank.
            said: anything.

        Raises:
            BaseException: the failure of this rank.
            Error: that of another one, with its rank.
            InvalidStateError: the ranks do not make the same call.
        """
        all_said = self.told(failure, (call, said))
        if failure is not None:
            raise failure
        for rank, (_, other) in enumerate(all_said):
            if other is not None:
                raise Error(f"the save before failed on rank {rank}: {other}") from other
        refuse_different([other for (other, _), _ in all_said])
        return [one for (_, one), _ in all_said]

    def see(self, path: str, *, is_found: bool = False) -> None:
        """Wait until all ranks see a checkpoint: a network file system may show it late.

        Args:
            path: the checkpoint's directory.
            is_found: a rank has found it; without this, ranks do not wait for what none sees.

        Raises:
            NoCheckpointError: some do not see what another one does, or has found.
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


def sendable(error: BaseException) -> BaseException:
    """Return an error that another rank can receive: this one, or one of its text."""
    return error if survives(error) else Error(f"{type(error).__name__}: {error}")


def survives(error: BaseException) -> bool:
    """Tell whether another process gets the same error."""
    import pickle  # which `import ringstow` does not

    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def sees(path: str) -> bool:
    """Return whether this rank sees a checkpoint, or the rank checkpoints that it consists of."""
    _shared_fs_lag.look_again(path)
    try:
        names = os.listdir(path)
    except OSError:
        return False
    # Not `rank00000-0.safetensors.part`: a save that is not committed.
    is_torchs = ".metadata" in names and any(name.endswith(".distcp") for name in names)
    has_parts = any(map(_concurrent_saves.RANK_DIR.fullmatch, names))
    return "manifest.json" in names or has_parts or is_torchs


def _wait_for(path: str) -> bool:
    """Wait until this rank sees a checkpoint; tell whether it does."""
    until = time.monotonic() + _shared_fs_lag.SEEN_S
    while not sees(path):
        was_removed = _native.has_gone(path) and _native.shared_file_system(path) is None
        if was_removed or time.monotonic() >= until:
            return False
        time.sleep(_shared_fs_lag.POLL_S)
    return True
