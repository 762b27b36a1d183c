"""`SavePlanner` plans as torch's default planner does."""

from __future__ import annotations

import dataclasses
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import EVEN_HIDDEN, HIDDEN, differences, trained
from planned import is_as_torch, planned
from ranks import on_ranks
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringstow
from ringstow.dcp import SavePlanner, StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam


def mixed_state(rank, layout, value=7):
    """Return a trained model, a replicated tensor, values and odd containers."""
    hidden = EVEN_HIDDEN if "tp" in layout else HIDDEN
    model, optimizer = trained(layout, hidden, seed=1)
    parts = get_state_dict(model, optimizer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": parts[0],
        "optim": parts[1],
        "step": value,
        "odd": {"a.b": [torch.ones(2), {"c": 1}], "empty": {}, "tuple": (1, torch.ones(1))},
        "list": [1, 2],
        "same": distribute_tensor(torch.arange(6.0), mesh, [Replicate()]),
        "of rank": {f"rank {rank}": torch.ones(3)},
        "parameter": torch.nn.Parameter(torch.ones(2, 3).t()),
        "none": None,
    }


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (1, ["plain", "fsdp2"]),
        (2, ["plain", "fsdp1", "fsdp2", "hsdp"]),
        (4, ["fsdp1", "hsdp", "fsdp2_tp"]),
    ],
)
@on_ranks()
def test_plans_and_metadata_are_those_of_torchs_planner(rank, world_size, names):
    for name in names:
        assert is_as_torch(mixed_state(rank, name)) > 3


@on_ranks(2)
def test_options_mean_what_they_mean_to_torch(rank):
    flat = {"same": torch.ones(4), "n": rank, f"own {rank}": torch.ones(rank + 1), 3: 4}
    for lowest in (False, True):
        only = {"dedup_save_to_lowest_rank": lowest}
        is_as_torch(mixed_state(rank, "fsdp2"), arguments=only)
        is_as_torch(flat, arguments={"flatten_state_dict": False, **only})
    is_as_torch(mixed_state(rank, "fsdp2"), arguments={"flatten_sharded_tensors": False})
    is_as_torch(mixed_state(rank, "fsdp2"), arguments={"dedup_replicated_tensors": True})
    is_as_torch(flat | {"lone": {"x": 1}}, use_collectives=False)
    is_as_torch(flat, no_dist=True)


def sharded_tensors(rank):
    """Return ShardedTensors: of one shard, of two, and without a local shard."""
    rows = torch.arange(8.0).reshape(2, 4) + rank
    one = [LocalShard.from_tensor_and_offsets(rows, [2 * rank, 0], rank)]
    two = [
        LocalShard.from_tensor_and_offsets(rows[:1].clone(), [rank, 0], rank),
        LocalShard.from_tensor_and_offsets(rows[1:].clone(), [2 + rank, 0], rank),
    ]
    return {
        "one": init_from_local_shards(one, 4, 4),
        "two": init_from_local_shards(two, 4, 4),
        "lone": init_from_local_shards(one if rank == 0 else [], 2, 4),
    }


@on_ranks(2)
def test_sharded_tensors_of_fsdp1_are_planned_as_by_torch(rank):
    is_as_torch({"s": sharded_tensors(rank), "t": torch.ones(2)})


def random_state(seed, rank, mesh):
    """Return a state that depends on the seed; of some kinds each rank has its own."""
    rng = random.Random(seed)
    state = {}
    for number in range(rng.randrange(1, 30)):
        shape = tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randrange(1, 4)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
        tensor = torch.zeros(shape, dtype=dtype)
        kind = rng.choice(["sharded", "replicated", "plain", "turned", "value", "own", "nested"])
        name = f"k{number}.x" if rng.random() < 0.3 else f"k{number}"
        if kind == "sharded":
            shard = Shard(rng.randrange(len(shape)))
            state[name] = distribute_tensor(tensor, mesh, [shard])
        elif kind == "replicated":
            state[name] = distribute_tensor(tensor, mesh, [Replicate()])
        elif kind == "turned":
            state[name] = tensor.movedim(0, -1).requires_grad_(dtype.is_floating_point)
        elif kind == "own":
            state[f"{name} of {rank}"] = tensor
        elif kind == "nested":
            state[name] = {"list": [tensor, number], "deep": {"er": tensor, 5: "five"}}
        else:
            state[name] = tensor if kind == "plain" else rng.choice([1, "a", None, [1], (2,)])
    return state


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_any_state_is_planned_as_by_torch_however_it_changes(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for seed in range(12 if world_size == 4 else 25):
        state = random_state(seed, rank, mesh)
        # The other rank's structure changes as well, or does not.
        changed = state | ({"more": torch.ones(2)} if (seed + rank) % 3 == 0 else {})
        try:
            expected = [planned(one, DefaultSavePlanner()) for one in (state, changed)]
        except CheckpointException as error:  # such as an empty shard that overlaps another
            failures = error.failures
            with pytest.raises(CheckpointException) as caught:  # noqa: PT012
                planned(state, SavePlanner())
                planned(changed, SavePlanner())
            assert str(caught.value.failures[0][0]) == str(failures[0][0])
            continue
        for one, expectation in zip((state, changed, changed, state), (0, 1, 1, 0), strict=True):
            assert planned(one, SavePlanner()) == expected[expectation], (seed, expectation)


@on_ranks(2)
def test_ranks_may_use_different_planners(rank):
    state = mixed_state(rank, "fsdp2")
    expected = planned(state, DefaultSavePlanner())
    for ours in (0, 1, 0, 1):
        for _ in range(2):
            planner = SavePlanner() if rank == ours else DefaultSavePlanner()
            assert planned(state, planner) == expected
    is_as_torch(state)


# With storage.


@on_ranks(2)
def test_saves_of_both_writers_load_with_torchs_planner(rank, tmp_path):
    mesh, writer = init_device_mesh("cpu", (2,)), StorageWriter()
    for step in range(3):
        paths = tmp_path / f"{step}", tmp_path / f"stock {step}"
        local = torch.arange(8.0).reshape(2, 4) + 10 * rank + 100 * step
        state = {
            "t": DTensor.from_local(local, mesh, [Shard(0)]),
            "odd": {"a.b": [torch.full((2,), float(step)), {"c": step}]},
            "step": step,
        }
        planner = SavePlanner()
        metadata, stock = (
            dcp.save(state, checkpoint_id=path, storage_writer=one, planner=planner)
            for path, one in zip(paths, (writer, dcp.FileSystemWriter(paths[1])), strict=True)
        )
        assert metadata.state_dict_metadata == stock.state_dict_metadata
        assert metadata.planner_data == stock.planner_data
        for one in (metadata, stock):  # a program that keeps it needs no ringstow to load it
            assert b"ringstow.dcp" not in pickle.dumps(one)
        for reader in (StorageReader(paths[0]), dcp.FileSystemReader(paths[1])):
            target = {
                "t": DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)]),
                "odd": {"a.b": [torch.zeros(2), {"c": None}]},
                "step": None,
            }
            dcp.load(target, storage_reader=reader)
            assert torch.equal(target["t"].to_local(), local)
            assert differences(target["odd"], state["odd"]) == []
            assert target["step"] == step
        for path in paths:  # of stock files it unpickles only what torch's writer pickles
            assert ringstow.load(path)["odd"]["a.b"][0].shape == (2,)


# Classes that derive from the planner.


class Renamed:
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Halved:
    """Torch's example: it changes in place what it got."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.index.fqn.endswith("half"):
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.half() if write_item.index.fqn.endswith("half") else data


class Extra:
    def create_local_plan(self):
        return dataclasses.replace(super().create_local_plan(), planner_data={"of": "rank"})

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        data = {key: value for plan in plans for key, value in plan.planner_data.items()}
        return plans, dataclasses.replace(metadata, planner_data=data)


class Looked:
    def lookup_object(self, index):
        self.looked = [*getattr(self, "looked", []), index.fqn]
        return super().lookup_object(index)

    def transform_object(self, write_item, object):
        return super().transform_object(write_item, object)


class Deduped:
    def _dedup_save_plans(self, all_plans):
        self.calls = getattr(self, "calls", 0) + 1
        return super()._dedup_save_plans(all_plans)


@on_ranks(2)
def test_derived_classes_plan_as_they_do_over_torchs_planner(rank):
    state = {"half": torch.ones(4), "other": torch.ones(4), "n": 1}
    for mixin in (Renamed, Halved, Extra, Looked, Deduped):
        ours = type(f"Our{mixin.__name__}", (mixin, SavePlanner), {})
        torchs = type(f"Torchs{mixin.__name__}", (mixin, DefaultSavePlanner), {})
        is_as_torch(state, (ours, torchs))
        planner, twin = ours(), torchs()
        for _ in range(2):
            planned(state, planner)
            planned(state, twin)
        for hook in ("looked", "calls"):
            assert getattr(planner, hook, None) == getattr(twin, hook, None)
        is_as_torch(state)  # what a class changes in place is not in the next plan of another


def test_planner_pickles_without_its_memory():
    planner = pickle.loads(pickle.dumps(SavePlanner(dedup_save_to_lowest_rank=True)))
    assert planner.dedup_save_to_lowest_rank
    assert planned({"a": torch.ones(2)}, planner, no_dist=True)[1] == [0]


def test_enable_plan_caching_is_refused():
    with pytest.raises(TypeError, match="enable_plan_caching"):
        SavePlanner(enable_plan_caching=True)


def test_torch_has_what_the_planner_checks_for():
    """Regression guard: torch has renamed a step that a class can override."""
    for name in ("_create_global_plan", "_dedup_save_plans"):
        checked = "_create_global_plan" in vars(DefaultSavePlanner)
        assert hasattr(DefaultSavePlanner, name) or not checked
