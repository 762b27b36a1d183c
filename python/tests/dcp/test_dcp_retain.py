"""Retention with several ranks: each rank writes its next shard over its old one."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import assert_same
from test_dcp_ranks import local, shards, zeros_like

import ringstow
from ringstow.dcp import StorageReader, StorageWriter


def _save_and_retain(rank, root):
    """Save three checkpoints and keep one; return the bytes written over recycled files."""
    writer, recycled = StorageWriter(), []
    for step in range(3):
        path = root / f"step-{step}"
        dcp.save(shards(step + 1.0), checkpoint_id=path, storage_writer=writer)
        recycled.append(writer.report.recycled_bytes)
        dist.barrier()
        if rank == 0:
            ringstow.retain(root, keep=1, recycle=True)
        dist.barrier()
    state = zeros_like(shards())
    dcp.load(state, checkpoint_id=root / "step-2", storage_reader=StorageReader())
    assert_same(local(state), local(shards(3.0)))
    return recycled


def test_each_rank_writes_over_its_old_shards(ranks, tmp_path):
    for recycled in ranks(2).run(_save_and_retain, tmp_path):
        assert [nbytes > 0 for nbytes in recycled] == [False, False, True]
    # Removal includes `.metadata`, the last file of a DCP checkpoint.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ringstow-spares", "step-2"]


def _save_in_place(rank, path):
    """Save repeatedly to one path."""
    writer = StorageWriter(config=ringstow.Config(recycle=True))
    recycled = []
    for step in range(4):
        dcp.save(shards(step + 1.0), checkpoint_id=path, storage_writer=writer)
        recycled.append(writer.report.recycled_bytes)
    return recycled


def test_repeated_saves_alternate_two_sets_of_files(ranks, tmp_path):
    for recycled in ranks(2).run(_save_in_place, tmp_path / "last"):
        assert [nbytes > 0 for nbytes in recycled] == [False, False, True, True]
