"""CoreWeave's tensorizer: its own threads write and read one file."""

from __future__ import annotations

from pathlib import Path

from comparing.peer import Finish, Peer, State, nothing_left

FILE = "state.tensors"


def save(state: State, path: Path) -> Finish:
    from tensorizer import TensorSerializer

    path.mkdir()
    serializer = TensorSerializer(str(path / FILE))
    serializer.write_state_dict(state)
    serializer.close()
    return nothing_left


def load(path: Path, like: State, device: str) -> State:
    from tensorizer import TensorDeserializer

    return dict(TensorDeserializer(str(path / FILE), device="cpu").items())


PEERS = {
    "tensorizer": Peer(
        "tensorizer", "tensorizer", save, load, requirements=("tensorizer==2.12.1",)
    ),
}
