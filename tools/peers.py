"""The libraries that compare.py puts side by side, and one measurement of one of them.

compare.py runs this file once a measurement, so that memory and caches are clean:
    python tools/peers.py save torch.save DIR --bytes 1000000000
    python tools/peers.py load torch.save DIR
It prints one JSON object. It never drops caches or removes files: that is the caller's part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

State = dict[str, torch.Tensor]
Finish = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """One library, one way of calling it.

    `module` is imported before anything is measured.
    `begin` returns when training may change the weights; calling what it returned waits until the
    checkpoint is durable. `load` reads all of it (None: loads as another row does); where it can
    only load `in_place`, it is given tensors of the right shapes.
    """

    module: str
    begin: Callable[[State, Path], Finish]
    load: Callable[[Path, State], State] | None
    in_place: bool = False


def nothing_left() -> None:
    """A synchronous save is durable when `begin` returns."""


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_ringstow(state: State, path: Path) -> Finish:
    import ringstow

    ringstow.save(state, path)
    return nothing_left


def save_ringstow_async(state: State, path: Path) -> Finish:
    import ringstow

    handle = ringstow.save_async(state, path)
    handle.wait_staged()
    return handle.result


def load_ringstow(path: Path, like: State) -> State:
    import ringstow

    return ringstow.load(path)


def save_torch(state: State, path: Path) -> Finish:
    path.mkdir()
    torch.save(state, path / "state.pt")
    fsync_path(path / "state.pt")
    fsync_path(path)
    return nothing_left


def load_torch(path: Path, like: State) -> State:
    loaded: State = torch.load(path / "state.pt", weights_only=True)
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


def load_dcp(path: Path, like: State) -> State:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(like, storage_reader=FileSystemReader(path), no_dist=True)
    return like


def save_safetensors(state: State, path: Path) -> Finish:
    from safetensors.torch import save_file

    path.mkdir()
    save_file(state, path / "state.safetensors")
    fsync_path(path / "state.safetensors")
    fsync_path(path)
    return nothing_left


def load_safetensors(path: Path, like: State) -> State:
    from safetensors.torch import load_file

    return load_file(path / "state.safetensors")


DCP = "torch.distributed.checkpoint"
PEERS = {
    "ringstow": Peer("ringstow", save_ringstow, load_ringstow),
    "ringstow-async": Peer("ringstow", save_ringstow_async, None),
    "torch.save": Peer("torch", save_torch, load_torch),
    "dcp": Peer(DCP, save_dcp, load_dcp, in_place=True),
    "dcp-8-threads": Peer(DCP, save_dcp_threads, load_dcp, in_place=True),
    "dcp-async": Peer(DCP, save_dcp_async, None),
    "safetensors": Peer("safetensors.torch", save_safetensors, load_safetensors),
}


def parameter_shapes(state_bytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of a transformer whose training state has about `state_bytes`."""
    width = 1024 if state_bytes >= 5e8 else 256
    yield "embed.weight", (16 * width, width)
    layer_bytes = 10 * 12 * width**2  # bf16 weight and two f32 moments: 10 bytes a parameter
    layers = max(1, round((state_bytes - 10 * 16 * width**2) / layer_bytes))
    for layer in range(layers):
        for name, rows, columns in [("qkv", 3, 1), ("project", 1, 1), ("up", 4, 1), ("down", 1, 4)]:
            yield f"layers.{layer}.{name}.weight", (rows * width, columns * width)
            yield f"layers.{layer}.{name}.bias", (rows * width,)
        for name in ("norm_attention", "norm_feed"):
            yield f"layers.{layer}.{name}.weight", (width,)
            yield f"layers.{layer}.{name}.bias", (width,)


def make_state(state_bytes: int, seed: int = 0) -> State:
    """Weights and Adam state: large matrices, many small vectors, scalars; all random bytes."""
    random = numpy.random.Generator(numpy.random.SFC64(seed))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        length = math.prod(shape) * dtype.itemsize
        words = random.integers(0, 2**64, size=-(-length // 8), dtype=numpy.uint64)
        raw = torch.from_numpy(words).view(torch.uint8)[:length]
        return raw.view(dtype).reshape(shape)

    state: State = {}
    for name, shape in parameter_shapes(state_bytes):
        state[f"model.{name}"] = tensor(shape, torch.bfloat16)
        state[f"optimizer.{name}.exp_avg"] = tensor(shape, torch.float32)
        state[f"optimizer.{name}.exp_avg_sq"] = tensor(shape, torch.float32)
        state[f"optimizer.{name}.step"] = tensor((), torch.float32)
    return state


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def digest(state: State) -> dict[str, list[Any]]:
    """Per tensor: dtype, shape, crc32. What a load must bring back."""
    return {
        name: [str(t.dtype), list(t.shape), zlib.crc32(raw_bytes(t).numpy().data)]
        for name, t in state.items()
    }


def touch(state: State) -> None:
    """Reads a byte of every page: a load that only maps the file has yet to read it."""
    for tensor in state.values():
        raw_bytes(tensor)[::4096].max()


def memory_bytes(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS (now) or VmHWM (the peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def cpu_seconds() -> float:
    """User and system time of this process, its threads, and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_save(peer: Peer, directory: Path, state_bytes: int) -> dict[str, float]:
    state = make_state(state_bytes)
    small = make_state(0, seed=1)
    importlib.import_module(peer.module)
    rss_before = memory_bytes("VmRSS")
    peer.begin(small, directory / "warm-up")()  # thread pools, buffers that are kept
    os.sync()  # nobody pays for the pages that somebody else left dirty
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak, VmHWM, to what is used now
    cpu_before = cpu_seconds()

    start = time.perf_counter()
    finish = peer.begin(state, directory / "checkpoint")
    blocked = time.perf_counter()
    finish()
    durable = time.perf_counter()

    result = {
        "bytes": sum(t.nbytes for t in state.values()),
        "seconds": durable - start,
        "blocked_seconds": blocked - start,
        "cpu_seconds": cpu_seconds() - cpu_before,
        "extra_ram_bytes": max(0, memory_bytes("VmHWM") - rss_before),
    }
    (directory / "digest.json").write_text(json.dumps([digest(small), digest(state)]))
    return result


def measure_load(peer: Peer, directory: Path) -> dict[str, float]:
    assert peer.load is not None
    small, expected = json.loads((directory / "digest.json").read_text())
    peer.load(directory / "warm-up", destination(small) if peer.in_place else {})
    like = destination(expected) if peer.in_place else {}
    cpu_before = cpu_seconds()

    start = time.perf_counter()
    state = peer.load(directory / "checkpoint", like)
    touch(state)
    seconds = time.perf_counter() - start

    result = {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu_before}
    if digest(state) != expected:
        raise RuntimeError("what was loaded is not what was saved")
    return result | {"bytes": sum(t.nbytes for t in state.values())}


def destination(expected: dict[str, list[Any]]) -> State:
    """Zeroed tensors of the shapes to load: a model that is already in memory."""
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, shape, _) in expected.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation", choices=["save", "load"])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    args = parser.parse_args()
    peer = PEERS[args.peer]
    if args.operation == "save":
        result = measure_save(peer, args.directory, args.bytes)
    else:
        result = measure_load(peer, args.directory)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
