"""Meta's torch_checkpointing: a manager that saves synchronously or in another process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left


@cache
def manager(saves: str) -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    kinds = CheckpointManager.Config
    config = kinds.with_sync_save() if saves == "sync" else kinds.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()


def save(state: State, path: Path) -> Finish:
    manager("sync").save(str(path), {"state": state})
    return nothing_left


def save_async(state: State, path: Path) -> Finish:
    written = manager("async").save(str(path), {"state": state})
    with manager("async").lock():  # its guide wraps optimizer.step() in this
        return lambda: written.result()


def prewarm(state: State, directory: Path) -> None:
    manager("async").prewarm_staging({"state": state})
    # Otherwise the measured save would wait for this one. There is no public call for it.
    manager("async")._prewarm_staging_future.result()


def load(path: Path, like: State, device: str) -> State:
    loaded: State = manager("sync").load(str(path), into={"state": like})["state"]
    return loaded


NOTE = "use_direct_io=False: ext4 and XFS refuse the unaligned direct writes of its default"
REQUIREMENTS = ("torch_checkpointing==0.1.1",)
PEERS = {
    "torch_checkpointing": Peer(
        "torch_checkpointing", "torch_checkpointing", save, load, in_place=True,
        note=NOTE,
        requirements=REQUIREMENTS,
    ),
    "torch_checkpointing-async": Peer(
        "torch_checkpointing", "torch_checkpointing", save_async, load, in_place=True,
        note=NOTE,
        loads_as="torch_checkpointing",
        prewarm=prewarm, requirements=REQUIREMENTS,
    ),
}  # fmt: skip
