"""Libraries that only load: they read files of safetensors with several threads."""

from __future__ import annotations

from pathlib import Path

from comparing.peer import Peer, State

FILE = "state.safetensors"


def load_fastsafetensors(path: Path, like: State, device: str) -> State:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(str(path / FILE), device="cpu", nogds=True) as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}


def load_runai(path: Path, like: State, device: str) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path / FILE))
        return dict(streamer.get_tensors())


PEERS = {
    "fastsafetensors": Peer(
        "fastsafetensors", "fastsafetensors", None, load_fastsafetensors,
        requirements=("fastsafetensors==0.5.0",),
    ),
    "runai-streamer": Peer(
        "runai_model_streamer", "runai-model-streamer", None, load_runai,
        requirements=("runai-model-streamer==0.17.0",),
    ),
}  # fmt: skip
