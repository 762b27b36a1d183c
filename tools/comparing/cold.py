"""What the tools share that measure cold loads by several ranks under torchrun."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from comparing.durable import drop_caches
from comparing.usage import read_bytes

T = TypeVar("T")


class Cold(NamedTuple, Generic[T]):
    """A load by all ranks: what it returned here, its seconds, the bytes that the disk gave all."""

    result: T
    seconds: float
    read: float


def cold_load(path: Path, way: Callable[[], T]) -> Cold[T]:
    """Load by all ranks what no page cache holds."""
    drop_caches(path)
    dist.barrier()
    before, begun = read_bytes(), time.monotonic()
    result = way()
    dist.barrier()
    seconds = time.monotonic() - begun
    return Cold(result, seconds, reduced(read_bytes() - before, dist.ReduceOp.SUM))


def reduced(value: float, how: dist.ReduceOp.RedOpType) -> float:
    """Return what all ranks' values come to."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, how)
    return float(values.item())


def quartiles(seconds: Sequence[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:6.2f} s ({low:.2f} to {high:.2f})"
