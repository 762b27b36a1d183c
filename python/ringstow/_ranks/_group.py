"""The ranks of a process group, as a team."""

from __future__ import annotations

import array
import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ringstow._core import _waiting
from ringstow._core._call_lock import CallLock
from ringstow._core._errors import Error, InvalidStateError
from ringstow._ranks._roll_call import RollCall
from ringstow._ranks._team import Team, sendable
from ringstow._state._torch_private import beside, limit

T = TypeVar("T")

# The tag of messages that a thread beside the call sends.
_BESIDE = 1


class Group(Team):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Store the ranks; None means the default group.

        Raises:
            InvalidStateError: the group was destroyed.
        """
        self.group = group
        with _needing(group):
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)
        self.turn = CallLock("a save or load of several ranks")
        """Held by the call that communicates. Calls run in the same order on all ranks."""
        self.is_awaited = False
        """Whether `begin_max` has begun what this rank has not waited for."""
        self.known: dict[Any, Any] = {}
        """Cached results of earlier saves for states of the same structure."""
        self._is_own = False
        """Whether nobody else uses the group."""
        self._roll_call: RollCall | None = None

    @property
    def may_send(self) -> bool:
        """Whether threads beside the call may send tensors on the CPU in the group."""
        return self._is_own and self.device == "cpu"

    @property
    def device(self) -> str:
        return "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"

    def global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self._patient():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.is_first else None
        with self._patient():
            dist.gather_object(value, values, dst=self.global_rank(0), group=self.group)
        return values or []

    def from_rank(self, rank: int, look: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        interrupt: BaseException | None = None
        if self.rank == rank:
            try:
                answer[0] = look()
            except Exception as error:  # the others must not wait for this rank
                answer[1] = sendable(error)
            except BaseException as error:  # Ctrl-C on this rank only
                interrupt = error
                name = "the first rank" if rank == 0 else f"rank {rank}"
                answer[1] = Error(f"{name} failed: {type(error).__name__}: {error}")
        with self._patient():
            dist.broadcast_object_list(answer, src=self.global_rank(rank), group=self.group)
        found, failure = answer
        if interrupt is not None:
            raise interrupt
        if failure is not None:
            raise failure
        result: T = found
        return result

    def begin_max(self, values: list[int]) -> Callable[[], list[int]]:
        # Faster than torch.tensor, which matters here alone.
        memory = torch.frombuffer(array.array("q", values), dtype=torch.int64).to(self.device)
        with _needing(self.group):
            work = dist.all_reduce(memory, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.is_awaited = True

        def wait() -> list[int]:
            # Usually it has long ended, and a timer costs more than the rest.
            with _needing(self.group) if work.is_completed() else self._patient():
                work.wait()
            self.is_awaited = False
            found: list[int] = memory.tolist()
            return found

        return wait

    def begin_send(self, memory: torch.Tensor, to: int) -> Callable[[], None]:
        """Begin to send a tensor's bytes to a rank; return what waits for the end."""
        work = dist.isend(memory, self.global_rank(to), self.group, tag=_BESIDE)
        return lambda: self._ended(work)

    def begin_receive(self, memory: torch.Tensor, of: int) -> Callable[[], None]:
        """Begin to fill a tensor with what a rank begins to send; return what waits for it."""
        work = dist.irecv(memory, self.global_rank(of), self.group, tag=_BESIDE)
        return lambda: self._ended(work)

    def begin_largest(self, number: torch.Tensor) -> Callable[[], None]:
        """Begin to make a number on the CPU the largest of all ranks; return what waits for it."""
        work = dist.all_reduce(number, dist.ReduceOp.MAX, self.group, async_op=True)
        return lambda: self._ended(work)

    def _ended(self, work: dist.Work | None) -> None:
        """Wait for the end of what was begun."""
        assert work is not None
        with _needing(self.group) if work.is_completed() else self._needed():
            work.wait()

    def send(self, memory: torch.Tensor, to: int) -> None:
        """Send a tensor's bytes to a rank, which waits for them."""
        with self._patient():
            dist.send(memory, dst=self.global_rank(to), group=self.group)

    def receive(self, memory: torch.Tensor, of: int) -> None:
        """Fill a tensor with the bytes that a rank sends."""
        with self._patient():
            dist.recv(memory, src=self.global_rank(of), group=self.group)

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

    def prepare_end(self) -> None:
        own = beside(cast("Any", self.group or dist.group.WORLD))
        if own is self.group:  # this torch makes no other
            return
        self._roll_call = RollCall(own, self.gathered, self.rank)
        group_of(self.group)._roll_call = self._roll_call  # saves communicate in that one

    def begin_end(self, left_s: float | None) -> None:
        if self._roll_call is not None:
            self._roll_call.begin(left_s)

    def finish_end(self) -> None:
        ended, self._roll_call = self._roll_call, None
        if ended is None:
            return
        for one in [self, *(made for _, made in _made.values() if made._roll_call is ended)]:
            one._roll_call = None
            if one._is_own and one.group is not None:
                limit(one.group, None)
        ended.end()

    @contextlib.contextmanager
    def _patient(self) -> Iterator[None]:
        """Log a warning if the other ranks are late.

        Raises:
            InvalidStateError: the group was destroyed.
            Error: in the last save of a training, ranks have ended or hang; names them.
        """
        ending = self._roll_call
        if ending is None or not ending.is_on:
            with self._needed():
                yield
            return
        left_s = ending.left_s()
        if left_s is not None and self._is_own:
            limit(self.group, left_s)
        try:
            with self._needed():
                yield
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # torch's refer to the group
            self._leave()
            raise ending.call(self.doing) from error

    @contextlib.contextmanager
    def _needed(self) -> Iterator[None]:
        with _needing(self.group), _waiting.patient(_awaited(self.rank, self.size, self.doing)):
            dist.get_rank(self.group)  # raises if it was destroyed; a collective may hang
            yield

    def _leave(self) -> None:
        """Close this rank's connections: ranks that wait for it fail, and look who is lost."""
        if self._is_own:
            group, self.group = self.group, None
            _made.pop(id(group), None)
            end(group)


def _awaited(rank: int, size: int, doing: str) -> str:
    where = f" in {doing}" if doing else ""
    return (
        f"rank {rank} of {size} waits for the other ranks{where}; all of them must make this call"
    )


@contextlib.contextmanager
def _needing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise a clear error if a call fails because the group is gone."""
    try:
        yield
    except Exception as error:
        if _lives(group):
            if isinstance(error, RuntimeError):  # gloo's, which names no rank
                error.add_note(
                    "another rank has ended, or cannot be reached, while a call of ringstow's on "
                    "all ranks needed it: see its log"
                )
            raise
        raise InvalidStateError(
            "the process group was destroyed while a save, load or copy needed it: call the "
            "handle's result(), or close the manager, before destroy_process_group()"
        ) from error


def _lives(group: dist.ProcessGroup | None) -> bool:
    """Return whether the group still exists."""
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except Exception:  # the process group was destroyed
        return False


def team_of(group: dist.ProcessGroup | None = None) -> Team:
    """Return the ranks of a group, None for all; this process alone if there is no group."""
    return Group(group) if dist.is_available() and dist.is_initialized() else Team()


def of_all_ranks() -> dist.ProcessGroup:
    """Make a gloo group of all ranks, which all call this. Log a warning if some are late."""
    with _waiting.patient(_awaited(dist.get_rank(), dist.get_world_size(), "new_group()")):
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))


# The groups for saves, by the caller's group; groups of an ended default group are dropped.
_made: dict[int, tuple[Any, Group]] = {}
_making = CallLock("a save or load of several ranks")


def group_of(given: dist.ProcessGroup | None) -> Group:
    """Return the ranks of a process group, in a new group that training does not use.

    All ranks of the group call it. None means the default group.

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
            own = of_all_ranks() if asked is world else beside(asked)
            made = Group(own)
            made._is_own = own is not asked
            for key in [key for key, (one, _) in _made.items() if not _lives(one)]:
                del _made[key]
            _made[id(asked)] = (asked, made)
    return made


def end_beside(given: dist.ProcessGroup) -> None:
    """End the group that `group_of` made for a process group, after its saves and loads."""
    with _making.held():
        known, made = _made.pop(id(given), (None, None))
    if known is given and made is not None and made.group is not None:
        end(made.group)


def end(group: dist.ProcessGroup | None) -> None:
    """End a process group that is no longer needed, if it still exists."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
