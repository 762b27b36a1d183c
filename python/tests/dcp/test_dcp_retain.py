"""Retention with several ranks: each rank writes its next shard over its old one."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support import assert_same
from test_dcp_ranks import local, shards, zeros_like

import ringstow
from ringstow.dcp import StorageReader, StorageWriter


@on_ranks(2)
def test_each_rank_writes_over_its_old_shards(rank, tmp_path):
    writer, recycled = StorageWriter(), []
    for step in range(3):
        path = tmp_path / f"step-{step}"
        dcp.save(shards(step + 1.0), checkpoint_id=path, storage_writer=writer)
        recycled.append(writer.report.recycled_bytes > 0)
        dist.barrier()
        if rank == 0:
            ringstow.retain(tmp_path, keep=1, recycle=True)
        dist.barrier()
    state = zeros_like(shards())
    dcp.load(state, checkpoint_id=tmp_path / "step-2", storage_reader=StorageReader())
    assert_same(local(state), local(shards(3.0)))
    assert recycled == [False, False, True]
    # Removal includes `.metadata`, the last file of a DCP checkpoint.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ringstow-spares", "step-2"]


@on_ranks(2)
def test_repeated_saves_alternate_two_sets_of_files(rank, tmp_path):
    writer, recycled = StorageWriter(config=ringstow.Config(recycle=True)), []
    for step in range(4):
        dcp.save(shards(step + 1.0), checkpoint_id=tmp_path / "last", storage_writer=writer)
        recycled.append(writer.report.recycled_bytes > 0)
    assert recycled == [False, False, True, True]
