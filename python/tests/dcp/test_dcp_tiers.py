"""`Config.tiers` of saves by several ranks: the first rank copies."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support import flip
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import distributed


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def wait(rank):
    """Wait for the copies on the first rank; the others can't."""
    if rank == 0:
        assert ringstow.wait_promoted(60)
    else:
        with pytest.raises(ringstow.InvalidStateError, match="the first rank"):
            ringstow.wait_promoted(60)
    dist.barrier()


@on_ranks(2)
def test_dcp_saves_are_copied_on(rank, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    path = tmp_path / "run" / "step-1"
    dcp.save(state_of(1), storage_writer=ringstow.dcp.StorageWriter(path, config))
    wait(rank)
    assert ringstow.verify(tmp_path / "shared" / "step-1").ok


def test_dcp_saves_without_collectives_refuse_tiers(tmp_path):
    writer = ringstow.dcp.StorageWriter(tmp_path / "a", ringstow.Config(tiers=[tmp_path / "b"]))
    with pytest.raises(ringstow.UnsupportedError, match="tiers needs collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def test_saves_in_another_process_refuse_tiers(tmp_path):
    """torch ends that process before its copies."""
    writer = ringstow.dcp.StorageWriter(tmp_path / "a", ringstow.Config(tiers=[tmp_path / "b"]))
    there = pickle.loads(pickle.dumps(writer))
    with pytest.raises(ringstow.UnsupportedError, match="save in a thread"):
        there.set_up_storage_writer(True, rank=0)


@on_ranks(2)
def test_saves_of_ranks_are_copied_on_once(rank, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    distributed.save(state_of(1), tmp_path / "run" / "step-1", config=config)
    handle = distributed.save_async(state_of(2), tmp_path / "run" / "step-2", config=config)
    handle.result()
    if rank == 0:
        assert handle.wait_promoted(60)
    else:
        with pytest.raises(ringstow.InvalidStateError, match="ask the first one"):
            handle.wait_promoted(60)
    wait(rank)
    assert ringstow.verify(tmp_path / "shared" / "step-2").ok


@on_ranks(2)
def test_nodes_without_a_manager_refuse_tiers(rank, tmp_path):
    options = {"nodes": ringstow.Nodes(), "config": ringstow.Config(tiers=[tmp_path / "shared"])}
    with pytest.raises(ringstow.InvalidStateError, match=r"CheckpointManager\(nodes=Nodes\(\)"):
        distributed.save(state_of(1), tmp_path / "run" / "step-1", **options)


@on_ranks(2)
def test_manager_of_ranks_copies_to_the_tiers_of_its_config(rank, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    with ringstow.CheckpointManager(tmp_path / "run", config=config) as manager:
        handle = manager.save_async(1, state_of(1))
        if rank == 0:
            assert handle.wait_promoted(60)
            assert manager.wait_promoted(60)
            assert ringstow.verify(tmp_path / "shared" / "step-00000001").ok
        else:
            with pytest.raises(ringstow.InvalidStateError, match="rank 0"):
                manager.wait_promoted(60)


def large(rank, seed):
    """Return tensors whose shards are each rank's own file, and a value."""
    made = torch.arange(1 << 18, dtype=torch.float32) + seed
    mesh = init_device_mesh("cpu", (2,))
    return {"w": distribute_tensor(made, mesh, [Shard(0)]), "n": made.clone(), "step": seed}


def save_two_tiers(rank, run, shared):
    config = ringstow.Config(tiers=[shared])
    for step in (1, 2):
        distributed.save(large(rank, step), run / f"step-{step}", step=step, config=config)
        wait(rank)


def restore(rank, tiers, path):
    """Load by a list of tiers, by a path with tiers, by DCP's reader and by a manager."""
    config = ringstow.Config(tiers=tiers[1:])
    report = None
    for load in (
        lambda state: distributed.load_into(state, tiers),
        lambda state: distributed.load_into(state, path, config=config),
        lambda state: dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path, config)),
        lambda state: ringstow.CheckpointManager(tiers[0], tiers=tiers[1:]).restore(into=state),
    ):
        state = large(rank, 0)
        report = load(state) or report
        wanted = large(rank, 2)
        assert state["step"] == 2
        assert torch.equal(state["w"].to_local(), wanted["w"].to_local())
        assert torch.equal(state["n"], wanted["n"])
    whole = distributed.load([str(tier) for tier in tiers])
    assert torch.equal(whole["w"], large(rank, 2)["w"].full_tensor())


def refuse_mixed(rank, tiers, path):
    with pytest.raises(ringstow.InvalidStateError, match="do not make the same call"):
        distributed.load(tiers if rank == 0 else path)
    with pytest.raises(ringstow.NoCheckpointError, match="no step was committed"):
        distributed.load([path / "none"])


def test_ranks_read_what_one_tier_lacks_from_the_next(ranks, tmp_path):
    run, shared = tmp_path / "run", tmp_path / "shared"
    two = ranks(2)
    two.run(save_two_tiers, run, shared)
    here, there = (sorted((tier / "step-2").glob("*.safetensors")) for tier in (run, shared))
    assert len(here) == len(there) >= 2
    for damaged in (here[0], there[1]):
        flip(damaged, -5000)
    two.run(restore, [run, shared], run / "step-2")
    there[1].unlink()
    here[0].unlink()
    two.run(restore, [run, shared], run / "step-2")
    two.run(refuse_mixed, [run, shared], run / "step-2")
