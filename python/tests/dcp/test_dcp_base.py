"""Several ranks that save with a base: each links the files of its own shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import gathered, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import distributed

ROWS = 4000  # of 16 bytes: more than all else


def state(step, placements=None):
    """Return a state of which the frozen tensors never change."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = placements or (Shard(0),)
    frozen = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4)
    return {
        "frozen": distribute_tensor(frozen, mesh, placements),
        "everywhere": torch.arange(500.0),
        "lora": distribute_tensor(torch.full((8, 4), float(step)), mesh, placements),
        "step": step,
    }


def check(path, step):
    loaded = state(0)
    distributed.load_into(loaded, path)
    for name, tensor in state(step).items():
        if name == "step":
            assert loaded[name] == step
        elif name == "everywhere":
            assert torch.equal(loaded[name], tensor)
        else:
            assert torch.equal(loaded[name].to_local(), tensor.to_local()), name


def assert_links(linked):
    """Of four saves the first two link nothing, and the others the frozen tensors."""
    assert linked[:2] == [0, 0]
    assert min(linked[2:]) > ROWS * 8


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_ranks_link_what_they_have(rank, tmp_path, background):
    linked = []
    for step in range(1, 5):
        path = tmp_path / f"step-{step}"
        options = {"base": ringstow.Base() if step == 1 else tmp_path / f"step-{step - 1}"}
        if background:
            done = distributed.save_async(state(step), path, **options).result()
        else:
            done = distributed.save(state(step), path, **options)
        linked.append(done.linked_bytes)
        check(path, step)
    assert_links(linked)
    dist.barrier()
    if rank == 0:
        for step in (1, 2, 3):
            ringstow.remove(tmp_path / f"step-{step}")
        assert ringstow.verify(tmp_path / "step-4").ok


@on_ranks(2)
def test_dcp_links_what_the_rank_has(rank, tmp_path):
    writer = ringstow.dcp.StorageWriter(base=ringstow.Base())
    linked = []
    for step in range(1, 5):
        path = tmp_path / f"step-{step}"
        dcp.save(state(step), checkpoint_id=path, storage_writer=writer)
        linked.append(writer.report.linked_bytes)
        writer.set_base(path)
        check(path, step)
    assert_links(linked)


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_manager_of_several_ranks_links_the_step_before(rank, tmp_path, background):
    linked = []
    with ringstow.CheckpointManager(tmp_path, keep=1, base="previous") as manager:
        for step in range(1, 5):
            if background:
                report = manager.save_async(step, state(step)).result()
            else:
                report = manager.save(step, state(step))
            linked.append(report.linked_bytes)
        restored = state(0)
        assert manager.restore(into=restored).step == 4
        assert torch.equal(restored["frozen"].to_local(), state(4)["frozen"].to_local())
        assert [found.step for found in manager.steps()] == [4]
    assert_links(linked)


@on_ranks(2)
def test_tensor_that_all_ranks_have_is_linked(rank, tmp_path):
    """Each rank writes a part of it."""
    for step in range(1, 4):
        base = ringstow.Base() if step == 1 else tmp_path / f"step-{step - 1}"
        done = distributed.save(state(step, (Replicate(),)), tmp_path / f"step-{step}", base=base)
        check(tmp_path / f"step-{step}", step)
    assert sum(gathered(done.linked_bytes)) > ROWS * 16


@on_ranks(2)
def test_ranks_with_different_or_missing_bases_fail_together(rank, tmp_path):
    for base, said in ((f"step-{rank}", r"same|base|differ|call"), ("none", "base")):
        with pytest.raises(Exception, match=said):
            distributed.save(state(2), tmp_path / "step-2", base=tmp_path / base)
    dist.barrier()
    assert not (tmp_path / "step-2").exists()


@on_ranks(2)
def test_ranks_that_save_each_by_itself_take_no_base(rank, tmp_path):
    writer = ringstow.dcp.StorageWriter(tmp_path / "step-1", base=ringstow.Base())
    with pytest.raises(BaseException, match="use_collectives=False"):
        dcp.save(state(1), storage_writer=writer, use_collectives=False)
