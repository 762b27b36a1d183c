"""`Config.tiers` of saves by several ranks: the first rank copies."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import distributed


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def save_by_dcp(rank, path, config):
    dcp.save(state_of(1), storage_writer=ringstow.dcp.StorageWriter(path, config))
    wait(rank)


def wait(rank):
    """Wait for the copies on the first rank; the others can't."""
    if rank == 0:
        assert ringstow.wait_promoted(60)
    else:
        with pytest.raises(ringstow.InvalidStateError, match="the first rank"):
            ringstow.wait_promoted(60)
    dist.barrier()


def test_dcp_saves_are_copied_on(ranks, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    ranks(2).run(save_by_dcp, tmp_path / "run" / "step-1", config)
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


def save_by_ranks(rank, root, config):
    distributed.save(state_of(1), root / "step-1", config=config)
    handle = distributed.save_async(state_of(2), root / "step-2", config=config)
    handle.result()
    if rank == 0:
        assert handle.wait_promoted(60)
    else:
        with pytest.raises(ringstow.InvalidStateError, match="ask the first one"):
            handle.wait_promoted(60)
    wait(rank)


def test_saves_of_ranks_are_copied_on_once(ranks, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    ranks(2).run(save_by_ranks, tmp_path / "run", config)
    assert ringstow.verify(tmp_path / "shared" / "step-2").ok


def refuse(rank, root, config):
    with pytest.raises(ringstow.InvalidStateError, match=r"CheckpointManager\(nodes=Nodes\(\)"):
        distributed.save(state_of(1), root / "step-1", nodes=ringstow.Nodes(), config=config)


def test_nodes_without_a_manager_refuse_tiers(ranks, tmp_path):
    ranks(2).run(refuse, tmp_path / "run", ringstow.Config(tiers=[tmp_path / "shared"]))


def manage(rank, root, config):
    with ringstow.CheckpointManager(root, config=config) as manager:
        handle = manager.save_async(1, state_of(1))
        if rank == 0:
            assert handle.wait_promoted(60)
            assert manager.wait_promoted(60)
        else:
            with pytest.raises(ringstow.InvalidStateError, match="rank 0"):
                manager.wait_promoted(60)


def test_manager_of_ranks_copies_to_the_tiers_of_its_config(ranks, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    ranks(2).run(manage, tmp_path / "run", config)
    assert ringstow.verify(tmp_path / "shared" / "step-00000001").ok


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
        content = bytearray(damaged.read_bytes())
        content[-5000] ^= 1
        damaged.write_bytes(content)
    two.run(restore, [run, shared], run / "step-2")
    there[1].unlink()
    here[0].unlink()
    two.run(restore, [run, shared], run / "step-2")
    two.run(refuse_mixed, [run, shared], run / "step-2")
