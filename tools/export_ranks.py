"""One rank of ``compare_dcp.py --export``: write one model in the ways that there are.

compare_dcp.py starts this program on each rank through torch.distributed.run. Rank 0 prints one
JSON object per measurement: {"round", "row", "what", and figures}. Rows: a sharded save by
ringstow's StorageWriter; export_hf; torch's HuggingFaceStorageWriter, whose rank 0 merges the
shards. All end durable: torch's files are synced by rank 0.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ringstow.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing.durable import fsync_tree
from dcp_ranks import all_bytes, remove, report, settle, timed
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

WIDTH = 2048

State = dict[str, DTensor]


def make_model(total_bytes: int, dim: int) -> State:
    """Return bfloat16 matrices sharded along one dimension, and replicated vectors."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(rank)
    shape = [4 * WIDTH, WIDTH]
    count = max(1, round(total_bytes / (shape[0] * shape[1] * 2)))
    shape[dim] //= world
    model: State = {}
    for layer in range(count):
        local = torch.empty(shape, dtype=torch.bfloat16)
        local.view(torch.int16).random_(generator=generator)
        model[f"layers.{layer}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)])
        model[f"layers.{layer}.norm"] = DTensor.from_local(torch.ones(WIDTH), mesh, [Replicate()])
    return model


def stock(model: State, path: Path) -> None:
    """Write shards and merge them, as torch does; then make the model durable."""
    writer = HuggingFaceStorageWriter(
        str(path),
        fqn_to_index_mapping=dict.fromkeys(model, 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(model, storage_writer=writer)
    if dist.get_rank() == 0:
        fsync_tree(path)


def measure(args: argparse.Namespace) -> None:
    model = make_model(int(args.gb * 1e9), 1 if args.columns else 0)
    writer = ringstow.dcp.StorageWriter()
    rows: list[tuple[str, Callable[[Path], object]]] = [
        ("sharded", lambda path: dcp.save(model, checkpoint_id=path, storage_writer=writer)),
        ("export", lambda path: ringstow.dcp.export_hf(model, path, max_shard_size="100TB")),
        ("torch", lambda path: stock(model, path)),
    ]
    for round_ in range(args.rounds):
        for row, write in rows[round_ % 3 :] + rows[: round_ % 3]:
            path = args.dir / f"{row}-{round_}"
            settle()
            seconds = timed(partial(write, path))
            report(round_, row, "export", bytes=all_bytes(model), seconds=seconds)
            remove(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--columns", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    measure(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
