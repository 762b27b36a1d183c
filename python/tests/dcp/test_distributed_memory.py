"""The memory of background saves by ranks: training waits for the copies, and not for the disk."""

import pytest
import torch

import ringstow
from ringstow import distributed

LARGE = 320 << 20
"""More than any save or load may take."""


def state_of(rank):
    return {f"rank {rank}": torch.ones(LARGE, dtype=torch.uint8)}


def save(rank, path, pool):
    config = ringstow.Config(write_rate="100M", pool_bytes=pool)
    return distributed.save_async(state_of(rank), path, config=config).result().seconds.wait


def save_by_a_manager(rank, path):
    config = ringstow.Config(write_rate="100M")
    with ringstow.CheckpointManager(path, config=config) as manager:
        return manager.save_async(1, state_of(rank)).result().seconds.wait


@pytest.mark.parametrize(("pool", "waits"), [("auto", False), ("64M", True)])
def test_copies_wait_for_the_disk_only_where_memory_is_bounded(ranks, tmp_path, pool, waits):
    assert [wait > 0 for wait in ranks(2).run(save, tmp_path / "c", pool)] == [waits, waits]


def test_manager_of_ranks_copies_without_waiting_for_the_disk(ranks, tmp_path):
    assert ranks(2).run(save_by_a_manager, tmp_path / "run") == [0.0, 0.0]
