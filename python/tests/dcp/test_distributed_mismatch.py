"""State dicts of several ranks that do not fit: all ranks fail together, and each says why."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import raised
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


def wrapped(rank, path):
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    state = {"model": weights("module.", value=1.0), "step": 3, "rng": PerRank(rank)}
    distributed.save({**state, "module.w": sharded}, path)
    w = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    into = {"model": weights(), "step": 0, "rng": PerRank(9), "w": w}
    said = raised(lambda: distributed.load_into(into, path))
    assert into["step"] == 0
    distributed.load_into(into, path, rename={"module": ""})
    assert all(value.eq(1).all() for value in into["model"].values())
    assert into["rng"].value == rank
    assert torch.equal(w.to_local(), sharded.to_local())
    part = weights()
    distributed.load_into(part, path, prefix="model.module")
    assert all(value.eq(1).all() for value in part.values())
    other = {} if rank else {"rename": {"module": ""}}
    different = raised(lambda: distributed.load_into(into, path, **other))
    other = {"rename": "module"} if rank else {}
    return said, different, raised(lambda: distributed.load_into(into, path, **other))


def test_a_prefix_is_named_on_all_ranks_with_the_rename_that_fits(ranks, tmp_path):
    for said, different, wrong in ranks(2).run(wrapped, tmp_path / "c"):
        kind, text = said
        assert kind == "KeyMismatchError"
        assert "not in the checkpoint (5): model.layers.0.weight" in text
        assert "only in the checkpoint (5): model.module.layers.0.weight" in text
        assert 'rename={"module": ""}' in text
        assert "strict=False" not in text
        assert "the same call" in different[1]
        assert "rename is a dict" in wrong[1]


def stages(rank, path):
    """Each rank has a half of the layers; rank 1 has one more that nobody saved."""
    mine = NAMES[2 * rank : 2 * rank + 2]
    distributed.save({"model": weights(names=mine, value=1.0)}, path)
    into = {"model": weights(names=[*mine, *["layers.9.weight"] * rank])}
    said = raised(lambda: distributed.load_into(into, path))
    distributed.load_into(into, path, strict=False)
    assert into["model"][mine[0]].eq(1).all()
    return said


def test_keys_of_other_ranks_are_neither_listed_nor_taken_for_renamed(ranks, tmp_path):
    one, other = ranks(2).run(stages, tmp_path / "c")
    assert "rank 1 failed: KeyMismatchError" in one[1]
    for _, text in (one, other):
        assert "not in the checkpoint (1): model.layers.9.weight; strict=False" in text
        assert "only in the checkpoint" not in text
        assert "->" not in text


def partly(rank, path):
    distributed.save({"model": weights(value=1.0)}, path)
    nothing = {"model": weights("module.")}
    empty = raised(lambda: distributed.load_into(nothing, path, strict=False))
    with logged(" fills ") as said:
        into = {"model": weights()} if rank == 0 else nothing
        distributed.load_into(into, path, strict=False)
    return empty, said


def test_ranks_that_all_fill_nothing_fail_and_the_first_that_fills_little_warns(ranks, tmp_path):
    outcomes = ranks(3).run(partly, tmp_path / "c")
    for (kind, text), _ in outcomes:
        assert kind == "KeyMismatchError"
        assert "would fill nothing" in text
        assert 'rename={"module": ""}' in text
    said = [said for _, said in outcomes]
    assert [len(one) for one in said] == [0, 1, 0]
    assert "fills 0 of the 4 tensors" in said[1][0]


def restores(rank, root, strict_of):
    with CheckpointManager(root) as manager:
        if manager.latest() is None:
            manager.save(1, {"model": weights("module.", value=1.0), "step": 3})
        wrong = raised(lambda: manager.restore(into={"model": weights(), "step": 0}))
        nothing = raised(lambda: manager.restore(into={"model": weights()}, strict=False))
        into = {"model": weights("module."), "new": 1}
        manager.restore(into=into, strict=False)
        assert all(value.eq(1).all() for value in into["model"].values())
        different = raised(lambda: manager.restore(into=into, strict=strict_of[rank]))
        return wrong, nothing, different


def test_restore_names_only_what_it_takes_on_ranks(ranks, tmp_path):
    for wrong, nothing, different in ranks(2).run(restores, tmp_path, [True, False]):
        assert 'rename={"module": ""} strips it' in wrong[1]
        assert "would fill nothing" in nothing[1]
        assert "the same call" in different[1]


def of_stock(rank, root):
    """A directory of torch's own writer."""
    dcp.save({"model": weights("module.", value=1.0), "step": 3}, checkpoint_id=root / "step-1")
    dist.barrier()
    with CheckpointManager(root) as manager:
        wrong = raised(lambda: manager.restore(into={"model": weights(), "step": 0}))
        nothing = raised(lambda: manager.restore(into={"model": weights()}, strict=False))
        into = {"model": weights("module."), "new": torch.ones(1)}
        manager.restore(into=into, strict=False)
        assert all(value.eq(1).all() for value in into["model"].values())
        with logged(" fills ") as said:
            manager.restore(into={"model": weights(), "step": 0}, strict=False)
        return wrong, nothing, said


def test_restore_of_stock_checkpoints_takes_strict_too(ranks, tmp_path):
    outcomes = ranks(2).run(of_stock, tmp_path)
    for wrong, nothing, _ in outcomes:
        assert "'module.'" in wrong[1]
        assert 'rename={"module": ""}' in wrong[1]
        assert "would fill nothing" in nothing[1]
    assert [len(said) for *_, said in outcomes] == [1, 0]
    assert ringstow.latest(tmp_path).path == str(tmp_path / "step-1")


def planned(rank, path):
    distributed.save({"model": weights(value=1.0), "more": 1}, path)
    reader = ringstow.dcp.StorageReader(path)
    try:
        dcp.load({"model": weights()}, storage_reader=reader, planner=ringstow.dcp.LoadPlanner())
    except CheckpointException as error:
        return str(error.failures[rank][0])
    return ""


def test_the_planner_names_its_own_argument(ranks, tmp_path):
    for text in ranks(2).run(planned, tmp_path / "c"):
        assert "LoadPlanner(strict=False) loads what is in both" in text
