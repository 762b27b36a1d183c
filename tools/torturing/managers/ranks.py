"""A training on several ranks: one forked process each, joined by gloo, killed together.

Whether its ranks die at the same moment is the dice's choice. A rank that finds another one gone
fails, which is right: nothing that it notes from then on counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .children import Child

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed.tensor import DTensor

# A rank that waits for a dead one gives up after so long.
PATIENCE_S = 60
# The longest time between the kills of two ranks.
APART_S = 0.03


def load() -> None:
    """Import what each rank would import by itself: a forked process has it."""
    import ringstow._manager._many_ranks  # noqa: F401
    import torch._dynamo  # what makes a DTensor imports it
    import torch.distributed.tensor

    torch.set_num_threads(1)


class Ranks:
    """The processes of one program; what rank 0 says and how it ends is what counts."""

    def __init__(self, work: Callable[[int, int], None], count: int, log: Path, dice: str) -> None:
        """Start them; ``work`` gets the rank and the pipe."""
        self._rng = random.Random(dice)
        ranks = range(count)
        self._first, *self._others = [Child(functools.partial(work, rank), log) for rank in ranks]
        self.is_killed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def kill(self) -> None:
        """Send SIGKILL to all, in any order, at once or one after the other."""
        self.is_killed = True
        children = [self._first, *self._others]
        self._rng.shuffle(children)
        pause = APART_S * self._rng.random() if self._rng.random() < 0.5 else 0
        for child in children:
            child.kill()
            time.sleep(pause)

    def output(self, seconds: float) -> bytes:
        """Wait for the end of all; return what rank 0 wrote to the pipe."""
        said = self._first.output(seconds)
        self.wait()
        return said

    def wait(self) -> int:
        """Wait for the end of all; return the first exit code that is not 0, rank 0's first."""
        codes = [self._first.wait(), *(child.wait() for child in self._others)]
        return next((code for code in codes if code), 0)


@contextlib.contextmanager
def joined(rank: int, count: int, folder: Path, number: int) -> Iterator[None]:
    """Make a process one of the ranks of a program."""
    import datetime

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/ranks-of-{number}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    yield
    dist.destroy_process_group()


def sharded(array: npt.NDArray[Any], count: int) -> DTensor:
    """Return a tensor of which this rank has its rows of the array."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (count,))
    mine = torch.chunk(torch.from_numpy(array), count)
    rank = mesh.get_local_rank()
    local = mine[rank] if rank < len(mine) else torch.empty(0)
    return DTensor.from_local(
        local.clone(), mesh, [Shard(0)], run_check=False, shape=torch.Size(array.shape), stride=(1,)
    )
