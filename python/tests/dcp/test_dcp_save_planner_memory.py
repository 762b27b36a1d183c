"""`SavePlanner` remembers plans: little travels if nothing changed, and no wrong plan is used."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from planned import Recorder, is_as_torch, planned
from ranks import on_ranks
from test_dcp_async import background
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ringstow
from ringstow.dcp import SavePlanner, StorageWriter, _plan_cache

pytestmark = pytest.mark.torch_seam


def many(mesh, count=300):
    one = torch.zeros(4, 4)
    return {"m": {f"layer.{n}": DTensor.from_local(one, mesh, [Shard(0)]) for n in range(count)}}


@on_ranks(2)
def test_unchanged_plans_do_not_travel(rank):
    state, writer = many(init_device_mesh("cpu", (2,))), Recorder()
    sizes = []
    for planner in (DefaultSavePlanner(), SavePlanner(), SavePlanner(), SavePlanner()):
        planned(state, planner, writer)
        sizes.append((writer.sent, writer.answered))
    torchs, first, *later = sizes
    for n in range(2 if rank == 0 else 0):
        assert first[n] < torchs[n] / 4
        assert all(one[n] < 1000 for one in later)


@pytest.mark.parametrize("changing", [0, 1])
@on_ranks(2)
def test_change_on_one_rank_changes_the_plan_of_all(rank, changing):
    state, writer = many(init_device_mesh("cpu", (2,))), Recorder()
    planned(state, SavePlanner(), writer)
    if rank == changing:
        state["more"] = torch.ones(5)
    expected = planned(state, DefaultSavePlanner())
    assert planned(state, SavePlanner(), writer) == expected
    assert (writer.sent > 1000) == (rank == changing)
    assert planned(state, SavePlanner(), writer) == expected
    if rank == changing:
        assert writer.sent < 1000


@on_ranks(2)
def test_every_change_of_a_value_is_seen(rank):
    """Change what a digest of names would not show."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(4, 4)
    changes = [
        DTensor.from_local(whole, mesh, [Shard(0)]),
        DTensor.from_local(whole, mesh, [Shard(1)]),
        DTensor.from_local(whole.bfloat16(), mesh, [Shard(1)]),
        DTensor.from_local(whole, mesh, [Replicate()]),
        DTensor.from_local(whole.t().clone().t(), mesh, [Shard(0)]),
        DTensor.from_local(whole, mesh, [Shard(0)]).requires_grad_(),
        whole,
        whole[:2],
        "text",
        {"x": whole},
    ]
    for value in changes:
        is_as_torch({"one": value, "two": torch.ones(1)})


@pytest.mark.parametrize(
    ("step", "on_rank"),
    [
        ("prepare_local_plan", 0),
        ("prepare_local_plan", 1),
        ("prepare_global_plan", 0),
        ("write_data", 0),
        ("write_data", 1),
        ("finish", 0),
    ],
)
@on_ranks(2)
def test_failed_save_leaves_no_plan_that_only_some_ranks_believe(rank, step, on_rank):
    mesh = init_device_mesh("cpu", (2,))
    state, writer = many(mesh, 20), Recorder()
    group = {"process_group": dist.new_group()}  # one that remembers nothing
    planned(state, SavePlanner(), writer, **group)
    changed = state | {"more": rank}
    writer.fails_in = step if rank == on_rank else None
    for failing in (state, changed, changed):
        with pytest.raises(CheckpointException, match=f"{step} fails"):
            planned(failing, SavePlanner(), writer, **group)
    writer.fails_in = None
    gc.collect()  # errors keep plans alive
    for one in (state, changed, state):
        expected = planned(one, DefaultSavePlanner())
        assert planned(one, SavePlanner(), writer, **group) == expected
    dist.destroy_process_group(group["process_group"])
    assert writer.sent < 1000  # and the memory works again


class Broken:
    """Not a value of a state: torch's planner fails on it."""

    @property
    def __create_write_items__(self):
        raise RuntimeError("broken value")


@on_ranks(2)
def test_rank_that_cannot_plan_fails_all(rank):
    state = {"a": torch.ones(2), "b": 1}
    planned(state, SavePlanner())
    bad = state | ({"c": Broken()} if rank == 1 else {})
    with pytest.raises(CheckpointException, match="broken value"):
        planned(bad, SavePlanner())
    is_as_torch(state)


def lose_memory(rank, loser):
    """Forget everything on one rank, as no program does."""
    state, writer = many(init_device_mesh("cpu", (2,)), 20), Recorder()
    kept = SavePlanner()
    planned(state, kept, writer)
    planned(state, kept, writer)
    del kept
    writer.plan = None
    if rank == loser:
        _plan_cache._memories.clear()
        gc.collect()
    outcome = None
    try:
        planned(state, SavePlanner(), writer)
    except CheckpointException as error:
        outcome = str(error)
    expected = planned(state, DefaultSavePlanner())
    assert planned(state, SavePlanner(), writer) == expected
    return outcome


def test_rank_that_has_lost_its_memory_is_no_danger(ranks):
    assert ranks(2).run(lose_memory, 1) == [None, None]  # it sends its plan again
    lost = ranks(2).run(lose_memory, 0)
    assert all("does not know" in one for one in lost)  # the coordinator: an error, on all


@on_ranks(2)
def test_one_planner_serves_two_states_and_two_groups(rank):
    mesh, writer, kept = init_device_mesh("cpu", (2,)), Recorder(), SavePlanner()
    one, two = many(mesh, 100), many(mesh, 101)
    group = dist.new_group([1, 0])
    options = {"process_group": group}
    for state in (one, two):
        planned(state, kept, writer)
        planned(state, kept, writer, **options)

    def check(state, **given):
        assert planned(state, kept, writer, **given) == planned(
            state, DefaultSavePlanner(), **given
        )

    for state in (one, two, one):
        for given in ({}, options):
            check(state, **given)
            assert writer.sent < 1000
    check(one, no_dist=True)
    planned(one, kept, writer, use_collectives=False)
    check(one)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_background_saves_remember_too(rank, tmp_path):
    group, writer = dist.new_group(backend="gloo"), StorageWriter()
    mesh = init_device_mesh("cpu", (2,))
    for step in range(3):
        path, local = tmp_path / f"{step}", torch.full((2, 4), float(step))
        state = {"t": DTensor.from_local(local, mesh, [Shard(0)]), "step": step}
        options = {"planner": SavePlanner(), "process_group": group}
        background(state, path, writer, **options)[1].result()
        loaded = ringstow.load(path)
        assert loaded["step"] == step
        assert torch.equal(loaded["t"], torch.full((4, 4), float(step)))
    dist.destroy_process_group(group)


@on_ranks(2)
def test_plans_that_a_writer_changes_are_not_remembered(rank):
    """A writer, or a caller, changes the lists that it gets."""

    class Dropping(Recorder):
        def prepare_global_plan(self, plans):
            for plan in plans:
                del plan.items[0]
                plan.planner_data.clear()
            return plans

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = many(mesh, 5)
    expected = planned(state, DefaultSavePlanner(), Dropping())
    assert planned(state, SavePlanner(), Dropping()) == expected
    assert planned(state, SavePlanner(), Dropping()) == expected
    metadata = dcp.save(state, storage_writer=Recorder(), planner=SavePlanner())
    metadata.state_dict_metadata.clear()
    is_as_torch(state)
