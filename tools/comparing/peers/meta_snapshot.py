"""torchsnapshot, which restores into existing tensors."""

from __future__ import annotations

from pathlib import Path

from comparing.peer import Finish, Peer, State, nothing_left


def save(state: State, path: Path) -> Finish:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(path), {"state": StateDict(**state)})
    return nothing_left


def save_async(state: State, path: Path) -> Finish:
    from torchsnapshot import Snapshot, StateDict

    pending = Snapshot.async_take(str(path), {"state": StateDict(**state)})
    return lambda: pending.wait()


def load(path: Path, like: State, device: str) -> State:
    from torchsnapshot import Snapshot, StateDict

    target = StateDict(**like)
    Snapshot(str(path)).restore({"state": target})
    return dict(target)


REQUIREMENTS = ("torchsnapshot==0.1.0",)
PEERS = {
    "torchsnapshot": Peer(
        "torchsnapshot", "torchsnapshot", save, load, in_place=True, requirements=REQUIREMENTS
    ),
    "torchsnapshot-async": Peer(
        "torchsnapshot", "torchsnapshot", save_async, load, in_place=True,
        loads_as="torchsnapshot", requirements=REQUIREMENTS,
    ),
}  # fmt: skip
