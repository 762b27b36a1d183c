"""PyTorch's own ways to save, and safetensors. All run in the project's own environment."""

from __future__ import annotations

from pathlib import Path

from comparing.peer import Finish, Peer, State, nothing_left

DCP = "torch.distributed.checkpoint"


def save_torch(state: State, path: Path) -> Finish:
    import torch

    path.mkdir()
    torch.save(state, path / "state.pt")
    return nothing_left


def load_torch(path: Path, like: State, device: str) -> State:
    import torch

    loaded: State = torch.load(path / "state.pt", weights_only=True, map_location=device)
    return loaded


def save_dcp(state: State, path: Path) -> Finish:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return nothing_left


def save_dcp_threads(state: State, path: Path) -> Finish:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=8)
    save(state, storage_writer=writer, no_dist=True)
    return nothing_left


def save_dcp_async(state: State, path: Path) -> Finish:
    from concurrent.futures import Future

    from torch.distributed.checkpoint.state_dict_saver import async_save

    future = async_save(state, checkpoint_id=path, no_dist=True)
    assert isinstance(future, Future)
    return future.result


def load_dcp(path: Path, like: State, device: str) -> State:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(like, storage_reader=FileSystemReader(path), no_dist=True)
    return like


def save_safetensors(state: State, path: Path) -> Finish:
    from safetensors.torch import save_file

    path.mkdir()
    save_file(state, path / "state.safetensors")
    return nothing_left


def load_safetensors(path: Path, like: State, device: str) -> State:
    from safetensors.torch import load_file

    return load_file(path / "state.safetensors", device=device)


PEERS = {
    "torch.save": Peer("torch", "torch", save_torch, load_torch, gpu=True),
    "dcp": Peer(DCP, "torch", save_dcp, load_dcp, fsync="own files", in_place=True, gpu=True),
    "dcp-8-threads": Peer(
        DCP, "torch", save_dcp_threads, load_dcp, fsync="own files", in_place=True, gpu=True,
        by_default=False,
    ),
    "dcp-async": Peer(
        DCP, "torch", save_dcp_async, load_dcp, fsync="own files", in_place=True, gpu=True,
        loads_as="dcp",
    ),
    "safetensors": Peer(
        "safetensors.torch", "safetensors", save_safetensors, load_safetensors, gpu=True
    ),
}  # fmt: skip
