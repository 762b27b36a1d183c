"""What a load on several ranks of a host reads from the disk, if all of them need the same bytes.

    torchrun --nproc-per-node 4 tools/shared_load.py /mnt/nvme
    torchrun --nproc-per-node 4 tools/shared_load.py /mnt/nvme --disk-rate 200M     # as root

Each round loads a replicated state twice, cold: past the page cache on every rank (`direct="on"`),
and as `ringstow.distributed.load_into` chooses. Prints medians with quartiles, and the bytes that
the disk gave, as multiples of the state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import ringstow
import torch
import torch.distributed as dist
from comparing.directories import fresh_directory
from comparing.durable import drop_caches
from ringstow import distributed
from stepping.slow_disk import slow_disk

TENSORS = 8
Switch = Literal["on", "auto"]
WAYS: tuple[Switch, ...] = ("on", "auto")


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    elements = int(args.gb * 1e9) // 4 // TENSORS
    state = {f"w{n}": torch.zeros(elements) for n in range(TENSORS)}
    with disk(args) as root, fresh_directory(root) if root else nullcontext() as directory:
        shared = [str(directory)]
        dist.broadcast_object_list(shared)
        path = Path(shared[0]) / "checkpoint"
        if rank == 0:
            ringstow.save({name: torch.randn(elements) for name in state}, path)
        found = [[load(state, path, way) for way in WAYS] for _ in range(args.rounds)]
        dist.barrier()
    if rank == 0:
        print(f"{size} ranks, {args.gb} GB each, {args.rounds} rounds, cold")
        for number, way in enumerate(WAYS):
            seconds = sorted(one[number][0] for one in found)
            low, middle, high = (
                statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
            )
            read = statistics.median(one[number][1] for one in found) / (args.gb * 1e9)
            print(f"direct={way:<5} {middle:6.2f} s ({low:.2f} to {high:.2f}), read {read:.2f} x")
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to save and load")
    parser.add_argument("--gb", type=float, default=0.8, help="the state (0.8)")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each way, 2 or more (5)")
    parser.add_argument("--disk-rate", help="a loop device of this rate instead: 200M")
    return parser.parse_args()


def disk(args: argparse.Namespace) -> AbstractContextManager[Path | None]:
    """Return the directory to save in, on the first rank."""
    if dist.get_rank():
        return nullcontext()
    if not args.disk_rate:
        return nullcontext(args.directory)
    size = int(args.gb * 1.2e9) + (256 << 20)
    return slow_disk(args.directory, size, ringstow.Config(write_rate=args.disk_rate).write_rate)


def load(state: dict[str, torch.Tensor], path: Path, way: Switch) -> tuple[float, float]:
    """Return the seconds of a cold load on all ranks, and the bytes that the disk gave."""
    if dist.get_rank() == 0:
        drop_caches(path)
    dist.barrier()
    before, begun = read_bytes(), time.monotonic()
    distributed.load_into(state, path, config=ringstow.Config(direct=way))
    dist.barrier()
    seconds = time.monotonic() - begun
    read = torch.tensor(read_bytes() - before, dtype=torch.float64)
    dist.all_reduce(read)
    return seconds, float(read)


def read_bytes() -> int:
    """Return the bytes that storage gave this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    main()
