"""Objects in the state of several ranks: what each rank has of its own, and what all have."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from support import logged

import ringstow
import ringstow.distributed
from ringstow._state.objects._state_dicts import Parts

pytestmark = pytest.mark.torch_seam


class Loader:
    """A loader of data, which is somewhere else on each rank."""

    def __init__(self, at, extra=None):
        self.state = {"at": at, "extra": extra}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


def save_loaders(rank, path):
    state = {
        "loader": Loader(rank * 10),
        "alike": Loader(5, torch.ones(3)),
        "rng": ringstow.RngState(),
    }
    random.seed(rank)
    torch.manual_seed(rank)
    ringstow.distributed.save(state, path)
    return random.random(), torch.rand(2).tolist()


def load_loaders(rank, path):
    state = {"loader": Loader(-1), "alike": Loader(-1), "rng": ringstow.RngState()}
    random.seed(77)
    torch.manual_seed(77)
    with logged() as said:
        ringstow.distributed.load_into(state, path)
    alike = state["alike"].state
    drawn = (random.random(), torch.rand(2).tolist())
    return state["loader"].state["at"], alike["at"], alike["extra"].tolist(), drawn, said


def test_each_rank_gets_its_own_state_of_a_loader_and_of_the_random_numbers(ranks, tmp_path):
    drawn = ranks(2).run(save_loaders, tmp_path / "a")
    assert drawn[0] != drawn[1]
    loaded = ranks(2).run(load_loaders, tmp_path / "a")
    assert [one[0] for one in loaded] == [0, 10]
    assert [one[3] for one in loaded] == drawn
    assert all(one[4] == [] for one in loaded)


def test_more_ranks_keep_what_differs_and_say_so_and_get_what_is_alike(ranks, tmp_path):
    ranks(2).run(save_loaders, tmp_path / "a")
    loaded = ranks(3).run(load_loaders, tmp_path / "a")
    assert [one[0] for one in loaded] == [0, 10, -1]
    assert [one[1:3] for one in loaded] == [(5, [1, 1, 1])] * 3
    (said,) = loaded[2][4]
    expected = "none of rank 2, which keeps its own: loader (saved by 2 ranks), rng (saved by 2"
    assert expected in said


def test_one_process_gets_rank_0s_without_a_group_and_saves_it(ranks, tmp_path):
    ranks(2).run(save_loaders, tmp_path / "a")
    state = {"loader": Loader(-1), "alike": Loader(-1), "rng": ringstow.RngState()}
    ringstow.load_into(state, tmp_path / "a")
    assert state["loader"].state["at"] == 0
    assert state["alike"].state["at"] == 5
    ringstow.save(state, tmp_path / "b")
    assert ringstow.load(tmp_path / "b")["loader"] == {"at": 0, "extra": None}


@on_ranks(2)
def test_a_rank_whose_object_has_no_state_fails_all(rank, tmp_path):
    class Broken(Loader):
        def state_dict(self):
            raise RuntimeError("no state")

    path = tmp_path / "a"
    if rank == 0:
        ringstow.save({"x": Loader(1)}, path)
    dist.barrier()
    for act in (ringstow.distributed.save, ringstow.distributed.load_into):
        _, text = raised(lambda act=act: act({"x": Broken(1) if rank else Loader(1)}, path))
        assert "no state" in text
    assert ringstow.load(path) == {"x": {"at": 1, "extra": None}}


def sharded_on_one(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer}
    with ringstow.CheckpointManager(path) as manager:
        manager.save(1, state)
    ringstow.save({"model": model}, path.parent / "plain")
    weight = model.weight.to_local().detach().clone()
    with torch.no_grad():
        model.weight.to_local().zero_()
    with ringstow.CheckpointManager(path) as manager:
        manager.restore(into={"model": model, "optimizer": optimizer})
    return torch.equal(model.weight.to_local(), weight)


def test_one_rank_saves_and_restores_a_sharded_model_as_one_process_does(ranks, tmp_path):
    assert ranks(1).run(sharded_on_one, tmp_path / "run") == [True]
    loaded = ringstow.load(tmp_path / "plain")["model"]["weight"]
    assert type(loaded) is torch.Tensor
    saved = ringstow.load(tmp_path / "run" / "step-00000001")["model"]["weight"]
    assert torch.equal(loaded, saved)


def save_stages(rank, path):
    """Two stages, the second with more groups, and other rates."""
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({f"l{rank}{part}": torch.nn.Linear(2, 2) for part in "ab"})
    groups = [{"params": [*one.parameters()]} for one in model.values()]
    if rank == 0:
        groups = [{"params": [*model.parameters()], "lr": 0.125}]
    else:
        groups[0]["lr"], groups[1]["lr"] = 0.125, 0.5
    optimizer = torch.optim.AdamW(groups)
    state = {"model": model, "optimizer": optimizer}
    if path is not None:
        for one in model.values():
            one(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ringstow.distributed.save(state, path)
    return state


def load_stages(rank, path):
    state = save_stages(rank, None)
    for group in state["optimizer"].param_groups:
        group["lr"] = 0.0
    ringstow.distributed.load_into(state, path)
    optimizer = state["optimizer"]
    return [group["lr"] for group in optimizer.param_groups], len(optimizer.state)


def run_save_stages(rank, path):
    save_stages(rank, path)


def test_stages_of_a_pipeline_have_groups_of_their_own(ranks, tmp_path):
    ranks(2).run(run_save_stages, tmp_path / "a")
    assert ranks(2).run(load_stages, tmp_path / "a") == [([0.125], 4), ([0.125, 0.5], 4)]
    groups = ringstow.load(tmp_path / "a")["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [6, 2]


def per_rank_rng(rank, path, saves):
    state = {"rng": ringstow.PerRank(ringstow.RngState())}
    torch.manual_seed(rank if saves else 50)
    (ringstow.distributed.save if saves else ringstow.distributed.load_into)(state, path)
    return torch.rand(1).item()


def test_an_object_in_a_per_rank_value_is_each_ranks_own(ranks, tmp_path):
    drawn = ranks(2).run(per_rank_rng, tmp_path / "a", True)
    assert ranks(2).run(per_rank_rng, tmp_path / "a", False) == drawn


@on_ranks(2)
def test_a_rank_of_fsdp1_that_fails_early_does_not_hold_up_the_others(rank, tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel

    path = str(tmp_path / "a")
    model = FullyShardedDataParallel(torch.nn.Linear(4, 2), device_id=torch.device("cpu"))
    state, save = {"model": model}, ringstow.distributed.save
    for act in (
        lambda: save(state, path, metrics={"loss": "no" if rank else 1.0}),
        lambda: ringstow.distributed.load_into(state, path if rank else f"{path}-not-there"),
    ):
        assert raised(act) is not None


def save_and_step(rank, path, sharded):
    """Rank 0 steps while rank 1 has yet to join the save."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = torch.zeros(256, 256)
    if sharded:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)])
    weight = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = -torch.ones_like(weight)
    if rank == 0:
        handle = ringstow.distributed.save_async({"w": weight}, path)
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        stepping.join(0.2)  # enough for a step that does not wait
        has_stepped = not stepping.is_alive()
        dist.barrier()
        stepping.join()
    else:
        dist.barrier()
        handle = ringstow.distributed.save_async({"w": weight}, path)
        has_stepped = False
        optimizer.step()
    handle.result()
    return has_stepped, ringstow.load(path)["w"].unique().tolist()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_waits_for_ranks_that_have_yet_to_join_the_save(ranks, tmp_path, sharded):
    for saved in ranks(2).run(save_and_step, tmp_path / "a", sharded):
        assert saved == (False, [0.0])


@on_ranks(2)
def test_a_change_of_a_dtensor_is_noticed(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)])
    taken = ringstow.distributed._save.encode(
        {"w": weight}, Parts({"w": weight}), rank, allow_pickle=False
    )
    weight.add_(1)
    assert taken.changed() == ["w"]
