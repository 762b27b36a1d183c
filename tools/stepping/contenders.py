"""The ways to save that step_time.py measures, for a training loop of plain PyTorch."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from comparing.durable import fsync_path, fsync_tree
from comparing.peer import Finish, nothing_left

State = dict[str, Any]

closing = ExitStack()
"""Ends what contenders keep between saves: close it at the end."""
starts: dict[str, bool] = {}

OWN = "own"
OWN_FILES = "own files"
ADDED = "added"
ADDED_IN_CALL = "added, in the call"


@dataclass(frozen=True)
class Row:
    """What the table tells of a contender.

    `needs` are modules. `fsync` says which side syncs: "own": the library; "own files": the library
    its files, the tool the directories; "added": the tool all. What the tool syncs belongs to the
    save.
    """

    needs: tuple[str, ...]
    fsync: str
    by_default: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Contender(Row):
    """One way to save.

    `begin` gets the state and a path where nothing is, and returns when the loop may go on; the
    function that it returns waits until the library is done. A loop holds `around_step` while the
    optimizer steps.
    """

    begin: Callable[[State, Path], Finish]
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext
    in_background: bool = True

    def save(self, state: State, path: Path) -> Finish:
        """Begin a save; return what waits until it is durable."""
        return partial(self.make_durable, self.begin(state, path), path)

    def make_durable(self, finish: Finish, path: Path) -> None:
        finish()
        if self.fsync == ADDED:
            fsync_tree(path)
        elif self.fsync == OWN_FILES:
            fsync_path(path)
            fsync_path(path.parent)


def missing(needs: tuple[str, ...]) -> str | None:
    """Return why a contender cannot run here, or None if all that it needs is installed."""
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


# --- ringstow ------------------------------------------------------------------------------------


def ringstow_async(staging: Any, state: State, path: Path, **settings: Any) -> Finish:
    import ringstow

    config = ringstow.Config(**settings)
    return ringstow.save_async(state, path, staging=staging, config=config).result


@cache
def manager_in(directory: Path) -> tuple[Any, Iterator[int]]:
    import ringstow

    manager = ringstow.CheckpointManager(directory, keep=1)
    closing.callback(manager.close)
    return manager, itertools.count(1)


def ringstow_manager(state: State, path: Path) -> Finish:
    manager, steps = manager_in(path.parent / "managed")
    finish: Finish = manager.save_async(next(steps), state).result
    return finish


@cache
def ringstow_writer() -> Any:
    import ringstow.dcp

    return ringstow.dcp.StorageWriter()


def ringstow_dcp(state: State, path: Path) -> Finish:
    return dcp_save(state, path, storage_writer=ringstow_writer())


# --- PyTorch -------------------------------------------------------------------------------------


def dcp_save(state: State, path: Path, **options: Any) -> Finish:
    import torch.distributed.checkpoint as dcp

    future: Any = dcp.async_save(state, checkpoint_id=path, no_dist=True, **options)
    finish: Finish = getattr(future, "upload_completion", future).result
    return finish


@cache
def stager() -> Any:
    """Return torch's stager: async, and with pinned memory where there is a GPU."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    has_gpu = torch.cuda.is_available()
    made = DefaultStager(
        StagingOptions(
            use_pinned_memory=has_gpu,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=has_gpu,
        )
    )
    closing.callback(made.close)
    return made


staging: list[Any] = []
"""What a loop waits for before the optimizer steps: torch's stager copies until then."""


def dcp_stager(state: State, path: Path) -> Finish:
    import torch.distributed.checkpoint as dcp

    saved: Any = dcp.async_save(state, checkpoint_id=path, no_dist=True, async_stager=stager())
    staging.append(saved.staging_completion)
    finish: Finish = saved.upload_completion.result
    return finish


@contextmanager
def until_staged() -> Iterator[None]:
    while staging:
        staging.pop().result()
    yield


def dcp_process(state: State, path: Path) -> Finish:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    with nullcontext() if starts.get("dcp-process") else group_of_one():
        finish = dcp_save(state, path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    starts["dcp-process"] = True
    return finish


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make the group that DCP needs to start its process, and NVRx for a save.

    The other contenders must find none.
    """
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_save(state: State, path: Path) -> Finish:
    import torch

    path.mkdir()
    torch.save(state, path / "state.pt")
    fsync_tree(path)  # within the call, because this save has no background
    return nothing_left


# --- torch_checkpointing -------------------------------------------------------------------------


@cache
def meta_manager() -> Any:
    from comparing.peers.meta_checkpointing import manager

    made = manager("async")
    closing.callback(made.close)
    return made


def meta_async(state: State, path: Path) -> Finish:
    written = meta_manager().save(str(path), {"state": state})
    return lambda: written.result()


def meta_lock() -> AbstractContextManager[object]:
    lock: AbstractContextManager[object] = meta_manager().lock()
    return lock


# --- NVIDIA's resiliency extension ---------------------------------------------------------------


@cache
def nvrx_queue() -> Any:
    """Return NVRx's queue to its process that saves, which stays."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    made = AsyncCallsQueue()
    closing.callback(made.close)
    return made


@cache
def shared_stager() -> Any:
    """Return torch's stager: in the call, to memory that other processes read."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    made = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    closing.callback(made.close)
    return made


def nvrx(state: State, path: Path) -> Finish:
    """Save by NVRx's writer in its process, with the calls of NVRx's example.

    NVRx's staging waits for CUDA, and copies no tensor of the CPU. Torch's stager copies instead.
    """
    from nvidia_resiliency_ext.checkpointing.async_ckpt import (
        core,
        filesystem_async,
        state_dict_saver,
    )

    with ExitStack() as group:
        group.enter_context(group_of_one())
        writer = filesystem_async.FileSystemWriterAsync(path)
        staged = shared_stager().stage(state)
        planned = state_dict_saver.save_state_dict_async_plan(staged, writer)
        write, _, arguments = writer.get_save_function_and_args()
        finalize = partial(state_dict_saver.save_state_dict_async_finalize, *planned)
        nvrx_queue().schedule_async_request(core.AsyncRequest(write, arguments, [finalize]))
        until_finished = group.pop_all()

    def finish() -> None:
        with until_finished:
            nvrx_queue().maybe_finalize_async_calls(blocking=True, no_dist=True)

    return finish


DCP_THREAD = "dcp-thread"
DCP_STAGER = "dcp-stager"

PLAIN: Mapping[str, Contender] = {
    "ringstow": Contender(("ringstow",), OWN, partial(ringstow_async, "guard")),
    "ringstow-manager": Contender(("ringstow",), OWN, ringstow_manager),
    "ringstow-dcp": Contender(("ringstow",), OWN, ringstow_dcp),
    DCP_THREAD: Contender(("torch",), OWN_FILES, dcp_save),
    DCP_STAGER: Contender(("torch",), OWN_FILES, dcp_stager, around_step=until_staged),
    "dcp-process": Contender(("torch",), OWN_FILES, dcp_process),
    "torch_checkpointing": Contender(
        ("torch_checkpointing",), ADDED, meta_async, around_step=meta_lock
    ),
    "nvrx": Contender(("nvidia_resiliency_ext",), OWN_FILES, nvrx),
    "torch.save": Contender(("torch",), ADDED_IN_CALL, torch_save, in_background=False),
    **{
        f"ringstow-{staging}": Contender(
            ("ringstow",), OWN, partial(ringstow_async, staging), by_default=False
        )
        for staging in ("snapshot", "wait", "unguarded")
    },
}


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings in a name such as "ringstow:nice=10,write_rate=500M"."""
    pairs = [setting.partition("=") for setting in name.partition(":")[2].split(",") if setting]
    return {field: int(text) if text.isdigit() else text for field, _, text in pairs}


def contender(name: str) -> Contender:
    """Return the contender of a name: `ringstow` with settings, or one of the table."""
    if not name.startswith("ringstow:"):
        return PLAIN[name]
    begin = partial(ringstow_async, "guard", **settings_of(name))
    return Contender(("ringstow",), OWN, begin)
