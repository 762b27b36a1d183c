"""Measures restores on two nodes of which one was lost: beside a restore of the same, whole.

    python tools/node_restore.py                       # 1 GB, 5 rounds
    python tools/node_restore.py --gb 4 --rounds 9 --dir /mnt/nvme

Each node is a process with a directory of its own, and each has a copy of the other's files. In
turns a round restores on both, on the survivor alone (all is on its disk), and on both after one
has lost its disk: the survivor sends what that node lacks over gloo. The page cache holds none of
the files. The seconds are those until all processes have their state.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ringstow
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comparing import speed
from comparing.directories import fresh_directory, machine
from comparing.durable import drop_caches
from comparing.speed import spread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LOST = 1
WAYS = ("both nodes are whole", "one node is lost, the other goes on alone", "one node is new")


def state_of(gb: float) -> dict[str, object]:
    """Return tensors of which each process has its share."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = speed.state_of(gb)
    return {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()}


def begin(rank: int, size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)


def save(rank: int, size: int, meeting: str, root: Path, gb: float) -> None:
    begin(rank, size, meeting)
    with ringstow.CheckpointManager(
        root / f"node{rank}", nodes=ringstow.Nodes(replicas=2)
    ) as manager:
        manager.save(1, state_of(gb))
        assert manager.wait_promoted()
    dist.destroy_process_group()


def restore(rank: int, size: int, meeting: str, root: Path, gb: float, answer: Path) -> None:
    begin(rank, size, meeting)
    state = state_of(gb)
    with ringstow.CheckpointManager(
        root / f"node{rank}", nodes=ringstow.Nodes(replicas=size)
    ) as manager:
        dist.barrier()
        began = time.perf_counter()
        manager.restore(into=state)
        dist.barrier()
        seconds = time.perf_counter() - began
        if rank == 0:
            answer.write_text(str(seconds))
    dist.destroy_process_group()


def run(size: int, function: object, *arguments: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (size, f"{folder}/meeting", *arguments), nprocs=size)


def seconds_of(way: str, saved: Path, gb: float) -> float:
    root, answer = saved.parent / "round", saved.parent / "seconds"
    shutil.copytree(saved, root)
    if way != WAYS[0]:
        shutil.rmtree(root / f"node{LOST}")
    drop_caches(root)
    run(1 if way == WAYS[1] else 2, restore, root, gb, answer)
    shutil.rmtree(root)
    return float(answer.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    asked = speed.parser(__doc__, "the disk of both nodes").parse_args(arguments)
    with fresh_directory(asked.dir) as here:
        run(2, save, here / "saved", asked.gb)
        found: list[dict[str, float]] = []
        for number in range(asked.rounds + 1):
            ways = WAYS if number % 2 else WAYS[::-1]
            found.append({way: seconds_of(way, here / "saved", asked.gb) for way in ways})
        about = machine(here)
    del found[0]
    print("| restore | seconds | speed, of the first in the round |\n|---|---|---|")
    for way in WAYS:
        seconds = [one[way] for one in found]
        ratios = [one[WAYS[0]] / one[way] for one in found]
        print(f"| {way} | {spread(seconds)} | {spread(ratios)} |")
    print(f"\n{asked.gb} GB, {asked.rounds} rounds, median (lowest to highest), {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
