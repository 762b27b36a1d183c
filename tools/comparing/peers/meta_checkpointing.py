"""Meta's torch_checkpointing: O_DIRECT, by a manager that saves at once or in another process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left


@cache
def manager(saves: str) -> Any:
    from torch_checkpointing import CheckpointManager

    config = CheckpointManager.Config
    return (config.with_sync_save() if saves == "sync" else config.with_async_save()).build()


def save(state: State, path: Path) -> Finish:
    manager("sync").save(str(path), {"state": state})
    return nothing_left


def save_async(state: State, path: Path) -> Finish:
    written = manager("async").save(str(path), {"state": state})
    with manager("async").lock():  # what its guide has around optimizer.step()
        return lambda: written.result()


def load(path: Path, like: State) -> State:
    loaded: State = manager("sync").load(str(path), into={"state": like})["state"]
    return loaded


REQUIREMENTS = ("torch_checkpointing==0.1.1",)
PEERS = {
    "torch_checkpointing": Peer(
        "torch_checkpointing", "torch_checkpointing", save, load, in_place=True,
        requirements=REQUIREMENTS,
    ),
    "torch_checkpointing-async": Peer(
        "torch_checkpointing", "torch_checkpointing", save_async, load, in_place=True,
        loads_as="torch_checkpointing", requirements=REQUIREMENTS,
    ),
}  # fmt: skip
