"""State dicts of several ranks that do not fit: all ranks fail together, and each says why."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks, raised
from support import logged
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import CheckpointManager, distributed
from ringstow.distributed import PerRank

pytestmark = pytest.mark.torch_seam

NAMES = [f"layers.{i}.weight" for i in range(4)]


def weights(prefix="", names=NAMES, value=0.0):
    return {f"{prefix}{name}": torch.full((3,), value) for name in names}


@on_ranks(2)
def test_a_prefix_is_named_on_all_ranks_with_the_rename_that_fits(rank, tmp_path):
    path = tmp_path / "c"
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    state = {"model": weights("module.", value=1.0), "step": 3, "rng": PerRank(rank)}
    distributed.save({**state, "module.w": sharded}, path)
    w = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    into = {"model": weights(), "step": 0, "rng": PerRank(9), "w": w}
    kind, text = raised(lambda: distributed.load_into(into, path))
    assert kind == "KeyMismatchError"
    assert "not in the checkpoint (5): model.layers.0.weight" in text
    assert "only in the checkpoint (5): model.module.layers.0.weight" in text
    assert 'rename={"module": ""}' in text
    assert "strict=False" not in text
    assert into["step"] == 0
    distributed.load_into(into, path, rename={"module": ""})
    assert all(value.eq(1).all() for value in into["model"].values())
    assert into["rng"].value == rank
    assert torch.equal(w.to_local(), sharded.to_local())
    part = weights()
    distributed.load_into(part, path, prefix="model.module")
    assert all(value.eq(1).all() for value in part.values())
    for other, said in (
        ({} if rank else {"rename": {"module": ""}}, "the same call"),
        ({"rename": "module"} if rank else {}, "rename is a dict"),
    ):
        _, text = raised(lambda other=other: distributed.load_into(into, path, **other))
        assert said in text


@on_ranks(2)
def test_keys_of_other_ranks_are_neither_listed_nor_taken_for_renamed(rank, tmp_path):
    """Each rank has a half of the layers; rank 1 has one more that nobody saved."""
    path = tmp_path / "c"
    mine = NAMES[2 * rank : 2 * rank + 2]
    distributed.save({"model": weights(names=mine, value=1.0)}, path)
    into = {"model": weights(names=[*mine, *["layers.9.weight"] * rank])}
    _, text = raised(lambda: distributed.load_into(into, path))
    assert rank == 1 or "rank 1 failed: KeyMismatchError" in text
    assert "not in the checkpoint (1): model.layers.9.weight; strict=False" in text
    assert "only in the checkpoint" not in text
    assert "->" not in text
    distributed.load_into(into, path, strict=False)
    assert into["model"][mine[0]].eq(1).all()


@on_ranks(3)
def test_ranks_that_all_fill_nothing_fail_and_the_first_that_fills_little_warns(rank, tmp_path):
    path = tmp_path / "c"
    distributed.save({"model": weights(value=1.0)}, path)
    nothing = {"model": weights("module.")}
    kind, text = raised(lambda: distributed.load_into(nothing, path, strict=False))
    assert kind == "KeyMismatchError"
    assert "would fill nothing" in text
    assert 'rename={"module": ""}' in text
    with logged(" fills ") as said:
        into = {"model": weights()} if rank == 0 else nothing
        distributed.load_into(into, path, strict=False)
    assert len(said) == (rank == 1)
    assert rank != 1 or "fills 0 of the 4 tensors" in said[0]


@on_ranks(2)
def test_restore_names_only_what_it_takes_on_ranks(rank, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        if manager.latest() is None:
            manager.save(1, {"model": weights("module.", value=1.0), "step": 3})

        def refusal(**into):
            return raised(lambda: manager.restore(**into))[1]

        assert 'rename={"module": ""} strips it' in refusal(into={"model": weights(), "step": 0})
        assert "would fill nothing" in refusal(into={"model": weights()}, strict=False)
        into = {"model": weights("module."), "new": 1}
        manager.restore(into=into, strict=False)
        assert all(value.eq(1).all() for value in into["model"].values())
        assert "the same call" in refusal(into=into, strict=rank == 0)


@on_ranks(2)
def test_restore_of_stock_checkpoints_takes_strict_too(rank, tmp_path):
    dcp.save({"model": weights("module.", value=1.0), "step": 3}, checkpoint_id=tmp_path / "step-1")
    dist.barrier()
    with CheckpointManager(tmp_path) as manager:
        _, wrong = raised(lambda: manager.restore(into={"model": weights(), "step": 0}))
        assert "'module.'" in wrong
        assert 'rename={"module": ""}' in wrong
        _, nothing = raised(lambda: manager.restore(into={"model": weights()}, strict=False))
        assert "would fill nothing" in nothing
        into = {"model": weights("module."), "new": torch.ones(1)}
        manager.restore(into=into, strict=False)
        assert all(value.eq(1).all() for value in into["model"].values())
        with logged(" fills ") as said:
            manager.restore(into={"model": weights(), "step": 0}, strict=False)
    assert len(said) == (rank == 0)
    assert ringstow.latest(tmp_path).path == str(tmp_path / "step-1")


@on_ranks(2)
def test_the_planner_names_its_own_argument(rank, tmp_path):
    distributed.save({"model": weights(value=1.0), "more": 1}, tmp_path / "c")
    reader, planner = ringstow.dcp.StorageReader(tmp_path / "c"), ringstow.dcp.LoadPlanner()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": weights()}, storage_reader=reader, planner=planner)
    said = str(caught.value.failures[rank][0])
    assert "LoadPlanner(strict=False) loads what is in both" in said
