"""DCP loads of a checkpoint that another save replaces meanwhile never mix the two."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from test_dcp_ranks import failure
from test_dcp_writer import cause
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
from ringstow.dcp import StorageReader


def save(step, path):
    ringstow.save({"a": torch.full((4,), float(step))}, path)


class BetweenTheRanks(StorageReader):
    """Another save commits after rank 0 opens the checkpoint, but before rank 1 does."""

    def read_metadata(self, *args, **kwargs):
        if dist.get_rank() == 0:
            metadata = super().read_metadata(*args, **kwargs)
            dist.barrier()
            return metadata
        dist.barrier()
        save(2, self.checkpoint_id)
        return super().read_metadata(*args, **kwargs)


class BeforeTheRead(StorageReader):
    """Another save commits after planning."""

    def read_data(self, *args, **kwargs):
        save(2, self.checkpoint_id)
        return super().read_data(*args, **kwargs)


@pytest.mark.parametrize("broadcast", [None, True])
@on_ranks(2)
def test_ranks_that_opened_different_saves_load_none(rank, tmp_path, broadcast):
    path = tmp_path / "last"
    if rank == 0:
        save(1, path)
        os.utime(path / "manifest.json", (1, 1))  # otherwise rank 1 refuses to replace it
    dist.barrier()
    state = {"a": torch.zeros(4)}
    reader = BetweenTheRanks(broadcast=broadcast)
    errors = failure(lambda: dcp.load(state, checkpoint_id=path, storage_reader=reader))
    assert all(isinstance(error, ringstow.ReplacedCheckpointError) for error in errors.values())
    assert "not all of them" in str(next(iter(errors.values())))
    assert (state["a"] == 0).all()
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader(broadcast=broadcast))
    assert (state["a"] == 2).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("verify", [True, False])
def test_checkpoint_replaced_after_planning_is_not_read(tmp_path, verify):
    save(1, tmp_path / "last")
    state = {"a": torch.zeros(4)}
    options = {"checkpoint_id": tmp_path / "last", "storage_reader": BeforeTheRead(verify=verify)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, **options)
    assert isinstance(cause(caught), ringstow.ReplacedCheckpointError)
    assert (state["a"] == 0).all()
