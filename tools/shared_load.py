"""What a load on several ranks reads from the disk, if all of them need the same bytes.

    torchrun --nproc-per-node 4 tools/shared_load.py /mnt/nvme
    torchrun --nproc-per-node 4 tools/shared_load.py /mnt/nvme --disk-rate 200M     # as root
    torchrun --nproc-per-node 4 tools/shared_load.py /mnt/nvme --nodes 2 --disk-rate 200M

Each round loads a replicated state cold, in each way of `Config(share_reads=)`, in turn. Prints
medians with quartiles, the bytes that the disk gave and those that ranks have sent, as multiples of
the state. With `--nodes`, as root, the ranks play hosts that share a disk: each has a copy of the
checkpoint there, and thus pages of its own in the cache, and its share of the cores. They share the
loopback.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, get_args

import ringstow
import torch
import torch.distributed as dist
from comparing.cold import cold_load, quartiles, reduced
from comparing.directories import fresh_directory
from comparing.processes import CompareFailed
from ringstow import _native, distributed
from ringstow._core._config import ShareReads
from stepping.slow_disk import run, slow_disk

TENSORS = 8
WAYS: tuple[ShareReads, ...] = get_args(ShareReads)


class Loaded(NamedTuple):
    """A cold load on all ranks: seconds; bytes that the disk gave, and that ranks have sent."""

    seconds: float
    read: float
    sent: float


def main() -> None:
    args = arguments()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = rank * args.nodes // size
    if args.nodes:
        _native.boot_id = lambda: f"node {node}"
        cores = sorted(os.sched_getaffinity(0))  # before other threads are started
        os.sched_setaffinity(0, cores[node :: args.nodes] or cores)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    elements = int(args.gb * 1e9) // 4 // TENSORS
    state = {f"w{n}": torch.zeros(elements) for n in range(TENSORS)}
    with disk(args) as root, fresh_directory(root) if root else nullcontext() as directory:
        shared = [str(directory)]
        dist.broadcast_object_list(shared)
        path = Path(shared[0]) / "checkpoint"
        if rank == 0:
            ringstow.save({name: torch.randn(elements) for name in state}, path)
            for other in range(1, args.nodes):
                shutil.copytree(path, path.with_name(f"copy-{other}"))
        dist.barrier()
        if node:
            mount_apart(path.with_name(f"copy-{node}"), path)
        found = [[load(state, path, way) for way in WAYS] for _ in range(args.rounds)]
        dist.barrier()
    if rank == 0:
        nodes = f" of {args.nodes} nodes" if args.nodes else ""
        print(f"{size} ranks{nodes}, {args.gb} GB each, {args.rounds} rounds, cold")
        for number, way in enumerate(WAYS):
            loads = [one[number] for one in found]
            read, sent = (
                statistics.median(one[at] for one in loads) / (args.gb * 1e9) for at in (1, 2)
            )
            print(
                f"share_reads={way:<5} {quartiles([one.seconds for one in loads])}, "
                f"read {read:.2f} x, sent {sent:.2f} x"
            )
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to save and load")
    parser.add_argument("--gb", type=float, default=0.8, help="the state (0.8)")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each way, 2 or more (5)")
    parser.add_argument("--nodes", type=int, default=0, help="how many hosts the ranks play")
    parser.add_argument("--disk-rate", help="a loop device of this rate instead: 200M")
    return parser.parse_args()


def disk(args: argparse.Namespace) -> AbstractContextManager[Path | None]:
    """Return the directory to save in, on the first rank."""
    if dist.get_rank():
        return nullcontext()
    if not args.disk_rate:
        return nullcontext(args.directory)
    size = int(args.gb * 1.2e9) * max(args.nodes, 1) + (256 << 20)
    return slow_disk(args.directory, size, ringstow.Config(write_rate=args.disk_rate).write_rate)


def mount_apart(copy: Path, path: Path) -> None:
    """Have this process alone see a copy at a path: its pages in the cache are this node's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000):  # CLONE_NEWNS
        raise CompareFailed("--nodes needs root: each node has mounts of its own")
    run("mount", "--make-rprivate", "/")
    run("mount", "--bind", str(copy), str(path))


def load(state: dict[str, torch.Tensor], path: Path, way: ShareReads) -> Loaded:
    """Return a cold load on all ranks."""
    config = ringstow.Config(share_reads=way)
    one = cold_load(path, lambda: distributed.load_into(state, path, config=config))
    return Loaded(one.seconds, one.read, reduced(one.result.received_bytes, dist.ReduceOp.SUM))


if __name__ == "__main__":
    main()
