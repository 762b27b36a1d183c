"""The ranks that save and load together, and what they ask each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ringstow._errors import InvalidStateError
from ringstow._turn import CallLock
from ringstow.dcp import _private, _together

T = TypeVar("T")


class Group:
    """Ranks, with a process group that training does not use, since saves run beside it."""

    def __init__(self, own: dist.ProcessGroup) -> None:
        self._own = own
        self.rank = dist.get_rank(own)
        self.size = dist.get_world_size(own)
        self.turn = CallLock("a save or load of several ranks")
        """Held by the call that communicates. Calls follow each other in one order on all ranks."""
        self.known: dict[Any, Any] = {}
        """What earlier saves have found out about states of the same structure."""

    @property
    def is_first(self) -> bool:
        """Whether this rank commits."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, on all ranks."""
        return _together.gathered(value, self._own)

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value, on the first rank; nothing on the others."""
        values: list[Any] | None = [None] * self.size if self.is_first else None
        with _together.patient(self._own):
            dist.gather_object(
                value, values, dst=dist.get_global_rank(self._own, 0), group=self._own
            )
        return values or []

    def from_rank(self, rank: int, look: Callable[[], T]) -> T:
        """Return what a function returns on one rank, or raise what it raises, on all."""
        return _together.from_rank(rank, look, self._own)

    def send(self, memory: torch.Tensor, to: int) -> None:
        """Send a tensor's bytes to a rank, which waits for them."""
        dist.send(memory, dst=dist.get_global_rank(self._own, to), group=self._own)

    def receive(self, memory: torch.Tensor, of: int) -> None:
        """Fill a tensor with the bytes that a rank sends."""
        dist.recv(memory, src=dist.get_global_rank(self._own, of), group=self._own)

    def send_bytes(self, content: bytes, to: int) -> None:
        """Send bytes to a rank, which waits for them."""
        self.send(torch.tensor([len(content)], device="cpu"), to)
        self.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), to)

    def receive_bytes(self, of: int) -> bytes:
        """Return the bytes that a rank sends."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.receive(size, of)
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.receive(content, of)
        return content.numpy().tobytes()

    def from_first(self, look: Callable[[], T]) -> T:
        """Return what a function returns on the first rank, or raise what it raises, on all."""
        return _together.from_first(look, self._own)

    def each(self, call: Callable[[], T]) -> T:
        """Return what a function returns on this rank, once it has returned on all ranks."""
        return _together.each(call, self._own)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank, and return what all return; fail on all if one fails."""
        return _together.together(work, self._own)

    def told(self, error: BaseException | None, value: T) -> list[tuple[T, BaseException | None]]:
        """Return every rank's value, and why it has failed."""
        return _together.told(error, value, self._own)

    def agreed(self, error: BaseException | None, value: T) -> list[T]:
        """Return every rank's value, or fail on all ranks if one has failed."""
        return _together.agreed(error, value, self._own)

    def see(self, path: str) -> None:
        """Wait until all ranks see what one sees: a network file system may show it late."""
        from ringstow.dcp import _latest

        seen = self.gathered(_latest.sees(path))
        if any(seen) and not all(seen):
            _latest.agree_on(path, self._own)


# The groups made so far, by the caller's; those of a default group that has ended are forgotten.
_made: dict[int, tuple[Any, Group]] = {}
_making = CallLock("a save or load of several ranks")


def group_of(given: dist.ProcessGroup | None) -> Group:
    """Return the ranks of a process group; all of them must call it. None means the default one.

    Raises:
        InvalidStateError: there is no process group, or this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidStateError(
            "ringstow.distributed needs a process group: call "
            "torch.distributed.init_process_group first, or use ringstow.save in one process"
        )
    world = dist.group.WORLD
    asked: Any = world if given is None else given
    if asked is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(asked) < 0:
        raise InvalidStateError(
            f"rank {dist.get_rank()} is not in the group: call this on the group's ranks only"
        )
    with _making.held():
        known, made = _made.get(id(asked), (None, None))
        if known is not asked or made is None:
            own = dist.new_group(backend="gloo") if asked is world else _private.beside(asked)
            made = Group(cast("dist.ProcessGroup", own))
            for key in [key for key, (one, _) in _made.items() if not _together.lives(one)]:
                del _made[key]
            _made[id(asked)] = (asked, made)
    return made


def end_beside(given: dist.ProcessGroup) -> None:
    """End what `group_of` has made for a process group, whose saves and loads have ended."""
    with _making.held():
        known, made = _made.pop(id(given), (None, None))
    if known is given and made is not None and dist.is_initialized():
        with contextlib.suppress(Exception):  # it may have ended with the ranks
            dist.destroy_process_group(made._own)
