"""One rank of compare_dcp.py: save and load the same state with DCP's storage and ringstow's.

compare_dcp.py starts this program on each rank through torch.distributed.run. Rank 0 prints one
JSON object per measurement: {"round", "row", "what", and figures}. Times start at a barrier and end
with the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ringstow.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing.durable import drop_caches
from comparing.fio import fio_jobs
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

SLICES = 16

State = dict[str, Any]


def report(round_: int, row: str, what: str, **figures: float) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"round": round_, "row": row, "what": what, **figures}), flush=True)


@contextmanager
def ranks() -> Iterator[None]:
    """Hold the process group of all ranks, without the libraries' warnings."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    yield
    dist.barrier()  # a rank that still sends must not lose the others
    dist.destroy_process_group()


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds.item())


# --- the state -----------------------------------------------------------------------------------


def make_state(total_bytes: int, mesh: DeviceMesh) -> State:
    """Return matrices sharded by rows as with FSDP2, replicated vectors, and a few scalars."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = 2048
    rows = 4 * width  # 32 MiB as bfloat16, 64 MiB as float32
    count = max(1, round(total_bytes / (rows * width * 10)))
    generator = torch.Generator().manual_seed(rank)
    state: State = {"step": 7, "lr": 1e-4}
    for layer in range(count):
        for part, dtype in [
            ("weight", torch.bfloat16),
            ("exp_avg", torch.float32),
            ("exp_avg_sq", torch.float32),
        ]:
            local = torch.empty(rows // world, width, dtype=dtype)
            local.view(torch.int32).random_(generator=generator)
            state[f"layers.{layer}.{part}"] = DTensor.from_local(local, mesh, [Shard(0)])
        state[f"layers.{layer}.norm"] = DTensor.from_local(torch.ones(width), mesh, [Replicate()])
    return state


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_bytes(state: State) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))


def like(state: State) -> State:
    """Return the same state with zeros, to load into."""
    return {k: torch.zeros_like(v) if isinstance(v, Tensor) else 0 for k, v in state.items()}


def check(loaded: State, saved: State) -> None:
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor):
            ours, theirs = local(loaded[name]), local(tensor)
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


# --- the contenders ------------------------------------------------------------------------------


def stock_writer(path: Path) -> Any:
    return dcp.FileSystemWriter(path)


def ringstow_writer(path: Path) -> Any:
    return ringstow.dcp.StorageWriter(path)


WRITERS = {"dcp": stock_writer, "ringstow": ringstow_writer}
READERS: dict[str, Callable[[Path], Any]] = {
    "dcp": dcp.FileSystemReader,
    "ringstow": ringstow.dcp.StorageReader,
}


class SlicePlanner(DefaultLoadPlanner):
    """Plans to load rows [k/16, (k+1)/16) of every matrix, as rank k of 16 would."""

    def __init__(self, number: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.number = number

    def create_local_plan(self) -> LoadPlan:
        items = []
        assert self.metadata is not None
        for name, tensor in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            offsets = torch.Size([self.number * tensor.shape[0], *[0] * (tensor.dim() - 1)])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape)
            items += create_read_items_for_chunk_list(name, entry, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


def slice_state(state: State) -> State:
    return {
        name: torch.zeros(tensor.shape[0] // SLICES, *tensor.shape[1:], dtype=tensor.dtype)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and tensor.dim() == 2
    }


def load_slice(row: str, path: Path, into: State) -> Any:
    reader = READERS[row](path)
    dcp.load(into, storage_reader=reader, planner=SlicePlanner(dist.get_rank()), no_dist=True)
    return getattr(reader, "report", None)


# --- the measurements ----------------------------------------------------------------------------


def cold(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        drop_caches(path)
    dist.barrier()


def measure_row(row: str, round_: int, root: Path, state: State, target: State) -> None:
    """Measure a durable save, a cold load, and a cold load of one sixteenth."""
    path = root / f"{row}-{round_}"
    settle()
    seconds = timed(lambda: dcp.save(state, storage_writer=WRITERS[row](path)))
    report(round_, row, "save", bytes=all_bytes(state), seconds=seconds)
    cold(path)
    seconds = timed(lambda: dcp.load(target, storage_reader=READERS[row](path)))
    report(round_, row, "load", bytes=all_bytes(state), seconds=seconds)
    check(target, state)
    into = slice_state(state)
    cold(path)
    seconds = timed(lambda: load_slice(row, path, into))
    needed = sum(t.nbytes for t in into.values()) * dist.get_world_size()
    report(round_, row, "slice", bytes=needed, seconds=seconds)
    remove(path)


def measure_async(
    row: str, writer: Any, round_: int, root: Path, state: State, saving: Any
) -> None:
    """Measure how long an asynchronous save blocks training, and how long it takes in total."""
    path = root / f"{row}-async-{round_}"
    settle()
    started = time.perf_counter()
    futures: list[Any] = []

    def begin() -> None:
        futures.append(
            dcp.async_save(state, checkpoint_id=path, storage_writer=writer, process_group=saving)
        )

    blocked = timed(begin)
    futures[0].result()
    seconds = time.perf_counter() - started
    report(round_, row, "async", bytes=all_bytes(state), blocked=blocked, seconds=seconds)
    remove(path)


def measure_overlap(
    writer: Any, stager: Any, round_: int, root: Path, state: State, saving: Any
) -> None:
    """Measure how long a save blocks training that overlaps with the staging."""
    path = root / f"overlap-{round_}"
    settle()
    responses: list[Any] = []

    def begin() -> None:
        responses.append(
            dcp.async_save(
                state,
                checkpoint_id=path,
                storage_writer=writer,
                async_stager=stager,
                process_group=saving,
            )
        )

    called = timed(begin)
    started = time.perf_counter()
    responses[0].staging_completion.result()
    # A forward and backward pass of this length hides the staging completely.
    staged = time.perf_counter() - started
    waited = timed(responses[0].staging_completion.result)
    responses[0].upload_completion.result()
    report(
        round_,
        "ringstow",
        "overlap",
        bytes=all_bytes(state),
        blocked=called + waited,
        staged=staged,
    )
    remove(path)


def measure_memcpy(round_: int, state: State, into: list[Tensor]) -> None:
    sources = [local(v) for v in state.values() if isinstance(v, Tensor)]

    def copy() -> None:
        for to, source in zip(into, sources, strict=True):
            to.copy_(source)

    report(round_, "memcpy", "memcpy", bytes=all_bytes(state), seconds=timed(copy))


def measure_fio(round_: int, root: Path, size: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for what, seconds in fio_jobs(root, size, dist.get_world_size()).items():
            report(round_, "fio", what, bytes=size, seconds=seconds)
    dist.barrier()


def settle() -> None:
    """Flush dirty pages and collect garbage, so that the next measurement does not pay for them."""
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def measure(args: argparse.Namespace) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = make_state(int(args.gb * 1e9), mesh)
    target = like(state)
    saving = dist.new_group(backend="gloo")
    ours, theirs = ringstow.dcp.StorageWriter(), dcp.FileSystemWriter(args.dir)
    stager = ours.stager()
    small = {"warm": torch.zeros(1000)}
    dcp.save(small, checkpoint_id=args.dir / "warm", storage_writer=ours)  # allocates the pools
    remove(args.dir / "warm")
    copies = [torch.empty_like(local(v)) for v in state.values() if isinstance(v, Tensor)]
    for round_ in range(args.rounds):
        rows = list(WRITERS) if round_ % 2 == 0 else list(WRITERS)[::-1]
        for row in rows:
            measure_row(row, round_, args.dir, state, target)
        if args.fio:
            measure_fio(round_, args.dir, all_bytes(state))
    del target
    for round_ in range(args.rounds + 1):  # the first allocates memory: reported, not counted
        measure_memcpy(round_, state, copies)
        measure_async("ringstow", ours, round_, args.dir, state, saving)
        measure_async("dcp", theirs, round_, args.dir, state, saving)
        measure_overlap(ours, stager, round_, args.dir, state, saving)


# --- replicated ----------------------------------------------------------------------------------


def measure_replicated(args: argparse.Namespace) -> None:
    """Measure cold loads of a replicated state, with and without broadcast.

    Without it each rank reads all bytes.
    """
    width = 2048
    rows = max(1, round(args.gb * 1e9 / 16 / width / 4))
    generator = torch.Generator().manual_seed(0)
    state: State = {
        f"layers.{n}": torch.empty(rows, width, dtype=torch.int32).random_(generator=generator)
        for n in range(16)
    }
    target = like(state)
    path = args.dir / "replicated"
    dcp.save(state, storage_writer=ringstow_writer(path))
    for round_ in range(args.rounds):
        for row in ("alone", "together")[:: 1 if round_ % 2 else -1]:
            cold(path)
            reader = ringstow.dcp.StorageReader(path, broadcast=row == "together")
            seconds = timed(partial(dcp.load, target, storage_reader=reader))
            assert reader.report is not None
            read = torch.tensor(reader.report.read_bytes)
            dist.all_reduce(read)
            report(
                round_, row, "load", bytes=all_bytes(state), seconds=seconds, read=float(read) / 1e9
            )
            check(target, state)
    remove(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--fio", action="store_true")
    args = parser.parse_args()
    with ranks():
        if args.replicated:
            measure_replicated(args)
        else:
            measure(args)


if __name__ == "__main__":
    main()
