"""ringstow, called as in the README."""

from __future__ import annotations

from pathlib import Path

from comparing.peer import Finish, Peer, State, nothing_left


def save(state: State, path: Path) -> Finish:
    import ringstow

    ringstow.save(state, path)
    return nothing_left


def save_async(state: State, path: Path) -> Finish:
    import ringstow

    handle = ringstow.save_async(state, path)
    handle.wait_staged()
    return handle.result


def save_earlier(state: State, directory: Path) -> None:
    import ringstow

    ringstow.save(state, directory / EARLIER)


def save_over(state: State, path: Path) -> Finish:
    import ringstow

    if (path.parent / EARLIER).exists():  # not before the warm-up
        ringstow.remove(path.parent / EARLIER, recycle=True)
    ringstow.save(state, path)
    return nothing_left


def load(path: Path, like: State, device: str) -> State:
    import ringstow

    return ringstow.load(path, device=device)


def load_into(path: Path, like: State, device: str) -> State:
    import ringstow

    ringstow.load_into(like, path)
    return like


def save_stream(state: State, path: Path) -> Finish:
    import ringstow
    import torch

    path.mkdir()
    with ringstow.open_write(path / "state.pt") as file:
        torch.save(state, file)
    return nothing_left


def load_stream(path: Path, like: State, device: str) -> State:
    import ringstow
    import torch

    with ringstow.open_read(path / "state.pt") as file:
        loaded: State = torch.load(file, weights_only=True)
    return loaded


EARLIER = "earlier"

PEERS = {
    "ringstow": Peer("ringstow", "ringstow", save, load, fsync="own", gpu=True),
    "ringstow-over": Peer(
        "ringstow",
        "ringstow",
        save_over,
        load,
        fsync="own",
        loads_as="ringstow",
        gpu=True,
        prewarm=save_earlier,
        note="removes an earlier checkpoint and saves over its files, as retain(recycle=True) does",
    ),
    "ringstow-into": Peer(
        "ringstow",
        "ringstow",
        save,
        load_into,
        fsync="own",
        in_place=True,
        saves_as="ringstow",
        gpu=True,
    ),
    "torch.save-stream": Peer(
        "ringstow",
        "ringstow",
        save_stream,
        load_stream,
        fsync="own files",
        by_default=False,
        note="torch.save and torch.load through ringstow.open_write and open_read",
    ),
    "ringstow-async": Peer(
        "ringstow", "ringstow", save_async, load, fsync="own", loads_as="ringstow", gpu=True
    ),
}
