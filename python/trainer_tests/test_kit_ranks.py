"""What the ranks of all integrations share: a state is filled from what any version has saved."""

from __future__ import annotations

import children
import pytest
import torch
import torch.distributed as dist
from children import on_ranks
from support import assert_same
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow._state.tree._mismatch import Call
from ringstow.integrations._kit._ranks import Ranks

children.preload(__name__)

# A tuple is one value, as integrations save what is not sharded.
META = ({"step": 3, 0: "zero", "moments": torch.ones(3), "sizes": (1, 2)},)


def state(rank, fill, *, is_saved=True):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((8, 4), fill), mesh, [Shard(0)])
    first = {"meta": META if is_saved else None} if rank == 0 or not is_saved else {}
    return {"model": {"weight": weight}, "optimizer": {"step": torch.tensor(fill)}, **first}


@on_ranks(2)
def test_a_state_is_filled_from_what_this_and_the_former_version_have_saved(rank, tmp_path):
    dist.init_process_group("gloo")
    all_ranks = Ranks()
    saved = state(rank, 3.0)
    save_by_dcp(
        saved, checkpoint_id=f"{tmp_path}/former", storage_writer=ringstow.dcp.StorageWriter()
    )
    all_ranks.save(saved, f"{tmp_path}/now", 3, apart=["optimizer"])
    for name in ("former", "now"):
        found = state(rank, 0.0, is_saved=False)
        all_ranks.fill(found, f"{tmp_path}/{name}", Call())
        assert found["model"]["weight"].to_local().eq(3).all()
        assert found["optimizer"]["step"] == 3
        assert_same(found["meta"], META)
        weights = {"model": state(rank, 0.0)["model"]}
        all_ranks.fill(weights, f"{tmp_path}/{name}", Call())  # leaves what has other keys
        assert weights["model"]["weight"].to_local().eq(3).all()
        more = {"model": {**weights["model"], "bias": torch.zeros(2)}}
        with pytest.raises(ringstow.KeyMismatchError, match="model.bias"):
            all_ranks.fill(more, f"{tmp_path}/{name}", Call())
    groups = len(dist.distributed_c10d._world.pg_map)
    all_ranks.close()
    assert len(dist.distributed_c10d._world.pg_map) == groups - 2
    dist.destroy_process_group()
