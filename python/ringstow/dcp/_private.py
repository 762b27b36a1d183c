"""The undocumented parts of torch that ringstow.dcp uses; no other file of dcp uses any.

A new torch may rename any of them. Each function says what it does in that case.
"""

from __future__ import annotations

import concurrent.futures.thread
import copy
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ringstow._state._torch_private import flattened as flattened
from ringstow._state._torch_private import refusal_of as refusal_of
from ringstow._state.tensors._shards import dtensor_like


class Call:
    """The call that a save is made in, as other threads see it.

    A call of a thread pool ends when the pool drops it, whether it returned or raised; any other
    call ends with its thread. If a new Python stores pool calls differently, all end with their
    threads, and a time limit applies before that (see `_saves_in_progress`).
    """

    def __init__(self) -> None:
        """Note the call that runs in this thread."""
        self._thread = threading.current_thread()
        item, module = _pool_item()
        self._item = None if item is None else weakref.ref(item)
        self.is_save = f"{module}.".startswith("torch.distributed.checkpoint.")
        """Whether it is DCP's own function, called by a pool, which makes one save."""

    def is_here(self) -> bool:
        """Return whether the call runs in this thread, or ran in it."""
        return self._thread is threading.current_thread()

    def has_ended(self) -> bool:
        """Return whether the call has ended."""
        return not self._thread.is_alive() or (self._item is not None and self._item() is None)


def _pool_item() -> tuple[object, str]:
    """Return the pool's work item that this thread runs, and the module of its function.

    (None, "") in any other thread.
    """
    pool = concurrent.futures.thread
    run = getattr(getattr(getattr(pool, "_WorkItem", None), "run", None), "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    module = ""
    while frame is not None and frame.f_code is not run:
        if frame.f_globals.get("__name__") != pool.__name__:
            module = frame.f_globals.get("__name__", "")
        frame = frame.f_back
    if frame is None:
        return None, ""
    names = frame.f_locals
    item = names.get("self")
    if isinstance(names, dict):  # a copy before Python 3.13, which the frame keeps
        names.pop("self", None)
    return item, "" if item is None else module


def group_text(key: str, text: str) -> str:
    """Return the text that the first rank of the default process group has stored under a key.

    Args:
        key: the same on all ranks.
        text: the text to store if this rank is the first.

    Raises:
        Exception: the store does not answer, or torch has no such functions.
    """
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(key, "", text).decode()


def group_count(key: str, number: int) -> int:
    """Add to a number that the default process group stores under a key, and return the sum.

    Raises:
        Exception: the store does not answer, or torch has no such function.
    """
    return int(dist.distributed_c10d._get_default_store().add(key, number))


def load_ranks() -> list[int] | None:
    """Return the ranks that take part in the ``dcp.load`` that calls this; None if unknown.

    DCP does not pass the process group or ``no_dist`` to a reader: they are in its frame.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "_load_state_dict":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    load: Any = frame.f_locals.get("distW")
    try:
        if not load.use_dist:
            return [dist.get_rank() if dist.is_initialized() else 0]
        return dist.get_process_group_ranks(load.group)
    except Exception:  # another torch version
        return None


class Meeting(NamedTuple):
    """The ranks that save together, and the planning rank."""

    group: dist.ProcessGroup | None
    """None for the default group, or for no group."""
    use_dist: bool
    coordinator_rank: int


def _in_save(name: str) -> Any:
    """Return a local variable of the ``dcp.save`` that calls this; None if unknown."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Trainers have methods of that name, too.
        is_dcps = frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint.")
        if is_dcps and frame.f_code.co_name == "_save_state_dict":
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def saved_state() -> Mapping[str, Any]:
    """Return the state that the ``dcp.save`` which calls this saves; an empty one if unknown.

    DCP passes a writer only the planner's plan.
    """
    state = _in_save("state_dict")
    return state if isinstance(state, Mapping) else {}


def planner_of_save() -> object:
    """Return the planner of the ``dcp.save`` that calls this; None if unknown.

    DCP has set it up before it sets up the writer, and plans afterwards.
    """
    return _in_save("planner")


def is_saved_by_ringstow() -> bool:
    """Return whether ringstow writes the ``dcp.save`` that calls this; false if unknown."""
    kinds = type(_in_save("storage_writer")).__mro__
    return any(kind.__module__ == "ringstow.dcp._writer" for kind in kinds)


def loaded_object(key: object) -> bool | None:
    """Return whether an object takes what the ``dcp.load`` that calls this loads under a key.

    DCP passes an object the loaded state; a module then copies it. None if unknown.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_dcps = frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint.")
        if is_dcps and frame.f_code.co_name == "load":
            state = frame.f_locals.get("state_dict")
            if isinstance(state, Mapping) and key in state:
                return isinstance(state[key], Stateful)
            return None
        frame = frame.f_back
    return None


def save_meeting() -> Meeting | None:
    """Return the ranks of the ``dcp.save`` that calls this; None if unknown.

    DCP does not pass the process group or ``no_dist`` to planner or writer: they are in its frame.
    """
    save = _in_save("distW")
    try:
        use_dist = bool(save.use_dist)
        group = save.group
        if use_dist and group is None:
            group = dist.group.WORLD  # a later default group is another one
        return Meeting(group if use_dist else None, use_dist, save.coordinator_rank)
    except AttributeError:  # another torch version, or not called by ``dcp.save``
        return None


def holds_sharded(state: dict[str, Any]) -> bool:
    """Return whether a nested state holds a ShardedTensor."""
    return any(
        issubclass(kind, ShardedTensor) for kind in {*map(type, flattened(state)[0].values())}
    )


def keys_before_2_4(state: dict[str, Any]) -> set[str] | None:
    """Return the flat names that a state had in checkpoints by torch 2.3; None if unknown."""
    from torch.distributed.checkpoint import _traverse

    traverse = getattr(_traverse, "traverse_state_dict_v_2_3", None)
    if traverse is None:
        return None
    keys: set[str] = set()
    traverse(state, lambda path, _: keys.add(".".join(map(str, path))))
    return keys


def overrides(kind: type, base: type, names: Iterable[str]) -> bool:
    """Return whether a class overrides methods of a base class.

    Args:
        kind: the class.
        base: a class that it derives from.
        names: the methods, besides those by which torch's planner makes a global plan.
    """
    # A method that another torch version lacks counts as not overridden.
    steps = ("_create_global_plan", "_dedup_save_plans", *names)
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in steps)


def set_version(metadata: Metadata) -> None:
    """Note the version of DCP's format, as torch's writer does; without a version, do nothing."""
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor once the collective that computes it has ended; on a GPU, its stream waits.

    Only functional collectives return tensors with a ``wait``; other tensors are returned
    unchanged.
    """
    wait = getattr(tensor, "wait", None)
    return wait() if callable(wait) else tensor


def dtensor_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a distributed tensor laid out as another is, over a local tensor in host memory."""
    if like.device_mesh.device_type != "cpu":
        # from_local would move the copy to the mesh's device.
        return DTensor(local, like._spec, requires_grad=False)
    made: DTensor = dtensor_like(like, local)
    return made


def sharded_tensor_of(parts: list[torch.Tensor], like: ShardedTensor) -> ShardedTensor:
    """Return a sharded tensor laid out as another is, over other local tensors."""
    sharded = copy.copy(like)
    shards = zip(parts, like.local_shards(), strict=True)
    sharded._local_shards = [Shard(part, shard.metadata) for part, shard in shards]
    return sharded
