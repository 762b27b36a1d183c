"""Orbax, JAX's checkpoint library, with NumPy arrays; a save that is waited for, or goes on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from comparing.peer import Finish, Peer, State, nothing_left
from comparing.peers.tensor_store import as_array, as_tensor


@cache
def checkpointer() -> Any:
    from orbax.checkpoint import AsyncCheckpointer, PyTreeCheckpointHandler

    return AsyncCheckpointer(PyTreeCheckpointHandler(use_compression=False))


def save_async(state: State, path: Path) -> Finish:
    from orbax.checkpoint import args

    arrays = {name: as_array(tensor) for name, tensor in state.items()}
    # Returns once it has copied the arrays.
    checkpointer().save(path.absolute(), args=args.PyTreeSave(arrays))
    return lambda: checkpointer().wait_until_finished()


def save(state: State, path: Path) -> Finish:
    save_async(state, path)()
    return nothing_left


def load(path: Path, like: State, device: str) -> State:
    from orbax.checkpoint import args

    loaded = checkpointer().restore(path.absolute(), args=args.PyTreeRestore())
    return {name: as_tensor(array) for name, array in loaded.items()}


REQUIREMENTS = ("orbax-checkpoint==0.12.8", "jax==0.10.2", "tensorstore==0.1.86")
NOTE = "use_compression=False: random bits do not compress, and its default tries for seconds"
PEERS = {
    "orbax": Peer(
        "orbax.checkpoint", "orbax-checkpoint", save, load, requirements=REQUIREMENTS, note=NOTE
    ),
    "orbax-async": Peer(
        "orbax.checkpoint", "orbax-checkpoint", save_async, load, loads_as="orbax",
        requirements=REQUIREMENTS, note=NOTE,
    ),
}  # fmt: skip
