"""Tests on a real GPU: ``make test-gpu``. Skipped, with a message, without one."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "dcp")]


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="no GPU here (torch.cuda.is_available() is false)")
    for item in items:
        if HERE in pathlib.Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture
def busy():
    """Return a function that keeps the current stream busy for about a second.

    Any call takes much less.
    """

    def keep():
        torch.cuda._sleep(2_000_000_000)  # clock cycles

    return keep


@pytest.fixture
def growth():
    """Return a function that returns the peak growth of torch's GPU memory in bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.max_memory_allocated() - before


@pytest.fixture
def group(tmp_path):
    """One rank, with NCCL for the GPU and gloo for background saves."""
    import torch.distributed as dist

    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
