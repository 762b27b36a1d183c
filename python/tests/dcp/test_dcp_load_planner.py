"""`LoadPlanner` makes the plans of torch's default planner, and sends no more than is needed."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import EVEN_HIDDEN, HIDDEN, differences, trained, whole
from ranks import on_ranks
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ringstow.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter, _plan_columns

pytestmark = pytest.mark.torch_seam


class Noting:
    """Notes the plan that a reader gets, and how many bytes of it travel."""

    def prepare_local_plan(self, plan):
        plan = super().prepare_local_plan(plan)
        self.sent = len(pickle.dumps(plan))
        return plan

    def read_data(self, plan, planner):
        assert type(plan) is LoadPlan
        self.items = [
            (item, item.dest_index.index, item.storage_index.index) for item in plan.items
        ]
        return super().read_data(plan, planner)


class OurReader(Noting, StorageReader):
    pass


class TorchsReader(Noting, dcp.FileSystemReader):
    pass


class Looking(Noting, dcp.FileSystemReader):
    """A reader whose coordinator looks at the plans of all ranks."""

    def prepare_global_plan(self, plans):
        self.seen = [sorted(item.dest_index.fqn for item in plan.items) for plan in plans]
        return plans


def items_of(make, reader, planner):
    dcp.load(make(), storage_reader=reader, planner=planner)
    return reader.items


def is_as_torch(make, path, *, strict=True, kind=None):
    """Compare plans into what ``make`` returns; return how many items there are."""
    kind = kind or (TorchsReader if (path / ".metadata").stat().st_size > 5000 else OurReader)
    expected = items_of(make, kind(path), DefaultLoadPlanner(allow_partial_load=not strict))
    assert items_of(make, kind(path), LoadPlanner(strict=strict)) == expected
    return len(expected)


def model_state(layout, seed):
    hidden = EVEN_HIDDEN if "tp" in layout else HIDDEN
    model, optimizer = trained(layout, hidden, seed=seed)
    parts = get_state_dict(model, optimizer)
    return {"model": parts[0], "optim": parts[1], "step": seed, "list": [1, torch.ones(1)]}


@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        (1, [("plain", "fsdp2")]),
        (2, [("fsdp1", "fsdp1"), ("fsdp2", "hsdp"), ("hsdp", "plain")]),
        (4, [("fsdp2_tp", "tp"), ("tp", "fsdp2_tp")]),
    ],
)
@on_ranks()
def test_plans_are_those_of_torchs_planner(rank, tmp_path, world_size, pairs):
    for saved, loaded in pairs:
        ours, torchs = tmp_path / f"{saved}-{loaded}", tmp_path / f"{saved}-{loaded}-torch"
        state = model_state(saved, 1)
        dcp.save(state, storage_writer=StorageWriter(ours), planner=SavePlanner())
        dcp.save(state, storage_writer=dcp.FileSystemWriter(torchs))
        for where, kind in ((ours, OurReader), (torchs, TorchsReader)):
            assert is_as_torch(lambda to=loaded: model_state(to, 2), where, kind=kind) > 3


@on_ranks(2)
def test_resharded_load_restores_every_element(rank, tmp_path):
    state = model_state("fsdp2", 1)
    dcp.save(state, storage_writer=StorageWriter(tmp_path), planner=SavePlanner())
    model, optimizer = trained("hsdp", HIDDEN, seed=2)
    expected = [value.full_tensor() for value in state["model"].values() if hasattr(value, "mesh")]
    parts = get_state_dict(model, optimizer)
    into = {"model": parts[0], "optim": parts[1], "step": 0, "list": [0, torch.zeros(1)]}
    dcp.load(into, storage_reader=StorageReader(tmp_path), planner=LoadPlanner())
    loaded = [value.full_tensor() for value in into["model"].values() if hasattr(value, "mesh")]
    assert differences(loaded, expected) == []
    assert into["step"] == 1
    assert whole(model, optimizer)


def random_layout(rng, tensor, mesh):
    kind = rng.choice(["plain", "replicated", "sharded"])
    if kind == "plain" or not tensor.dim():
        return tensor.clone()
    placement = Replicate() if kind == "replicated" else Shard(rng.randrange(tensor.dim()))
    return distribute_tensor(tensor, mesh, [placement])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_any_layout_loads_into_any_other_as_by_torch(rank, tmp_path, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for seed in range(4 if world_size == 4 else 8):
        rng = random.Random(seed)
        shapes = [[rng.randrange(1, 6) for _ in range(rng.randrange(4))] for _ in range(12)]
        tensors = {
            f"t{number}.x" if rng.random() < 0.3 else f"t{number}": torch.rand(shape)
            for number, shape in enumerate(shapes)
        }
        values = {"n": {"v": seed, "w": [1, {"x": 2}]}}
        saved = {key: random_layout(rng, one, mesh) for key, one in tensors.items()}
        where = tmp_path / str(seed)
        dcp.save(saved | values, storage_writer=StorageWriter(where), planner=SavePlanner())
        targets = rng.getstate()

        def make(rng=rng, targets=targets, tensors=tensors, partial=seed % 2):
            rng.setstate(targets)
            names = list(tensors)[partial:]
            into = {key: random_layout(rng, torch.zeros_like(tensors[key]), mesh) for key in names}
            return into | {"n": {"v": None, "w": [None, {"x": None}]}}

        is_as_torch(make, where, strict=not seed % 2, kind=OurReader)
        into = make()
        planner = LoadPlanner(strict=not seed % 2)
        dcp.load(into, storage_reader=StorageReader(where), planner=planner)
        assert into.pop("n") == values["n"]
        for key, one in into.items():
            full = one.full_tensor() if isinstance(one, DTensor) else one
            assert torch.equal(full, tensors[key]), (seed, key)


def many(mesh, count=300):
    return {
        f"layer.{n}": DTensor.from_local(torch.full((4, 4), float(n)), mesh, [Shard(0)])
        for n in range(count)
    }


@on_ranks(2)
def test_plans_travel_in_columns_and_only_to_who_reads_them(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    dcp.save(many(mesh), storage_writer=StorageWriter(tmp_path / "ours"))
    dcp.save(many(mesh), storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"))
    sizes = []
    for reader, planner in [
        (OurReader(tmp_path / "ours"), DefaultLoadPlanner()),
        (OurReader(tmp_path / "ours"), LoadPlanner()),
        (TorchsReader(tmp_path / "torchs"), LoadPlanner()),
    ]:
        items_of(lambda: many(mesh), reader, planner)
        sizes.append(reader.sent)
    torchs, ours, in_columns = sizes
    assert ours < 1000
    assert in_columns < torchs / 4
    reader = Looking(tmp_path / "torchs")
    items_of(lambda: many(mesh), reader, LoadPlanner())
    if rank == 0:
        assert reader.seen == [sorted(many(mesh))] * 2


@on_ranks(2)
def test_plans_do_not_travel_back(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    dcp.save(many(mesh), storage_writer=dcp.FileSystemWriter(tmp_path))

    class Answering(dcp.FileSystemReader):
        def prepare_global_plan(self, plans):
            self.answered = max(len(pickle.dumps(plan)) for plan in plans)
            return plans

    reader, into = Answering(tmp_path), many(mesh)
    for tensor in into.values():
        tensor.to_local().zero_()
    dcp.load(into, storage_reader=reader, planner=LoadPlanner())
    assert all(torch.all(one.to_local() == n) for n, one in enumerate(into.values()))
    if rank == 0:
        assert 1 <= reader.answered < 1000


@on_ranks(2)
def test_ranks_may_use_different_planners(rank, tmp_path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(many(mesh, 5), storage_writer=StorageWriter(tmp_path))
    for ours in range(2):
        into = {name: torch.zeros(8, 4) for name in many(mesh, 5)}
        planner = LoadPlanner() if rank == ours else DefaultLoadPlanner()
        dcp.load(into, storage_reader=StorageReader(tmp_path), planner=planner)
        assert all(torch.all(one == n) for n, one in enumerate(into.values()))


@on_ranks(2)
def test_readers_that_broadcast_see_the_plans(rank, tmp_path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = {"same": torch.arange(100.0), "t": many(mesh, 2)["layer.1"]}
    dcp.save(saved, storage_writer=StorageWriter(tmp_path))
    for broadcast in (True, rank == 0 or None):
        into = {"same": torch.zeros(100), "t": DTensor.from_local(torch.zeros(4, 4), mesh)}
        into["t"] = DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)])
        reader = StorageReader(tmp_path, broadcast=broadcast)
        dcp.load(into, storage_reader=reader, planner=LoadPlanner())
        assert torch.equal(into["same"], saved["same"])
        assert torch.equal(into["t"].to_local(), saved["t"].to_local())


def test_checkpoint_by_torch_2_3_loads_by_its_own_names(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "hyper": {"lr": 0.1, "deep": {"x": 1}}}
    _version._derived_version = "2_3"
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    finally:
        _version._derived_version = None
    for planner in (DefaultLoadPlanner(allow_partial_load=True), LoadPlanner(strict=False)):
        into = {"model": {"w": torch.zeros(2)}, "hyper": {"lr": None, "deep": {"x": None}}}
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
        assert differences(into, state) == []


class Scaled:
    """Overrides all hooks that are called for each item."""

    def lookup_tensor(self, index):
        self.looked = [*getattr(self, "looked", []), index.fqn]
        return super().lookup_tensor(index)

    def transform_tensor(self, read_item, tensor):
        return super().transform_tensor(read_item, tensor)

    def commit_tensor(self, read_item, tensor):
        tensor.mul_(2)

    def load_bytes(self, read_item, value):
        super().load_bytes(read_item, value)
        self.looked = [*getattr(self, "looked", []), read_item.dest_index.fqn]


class Skipping:
    """Changes the plan."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        plan.items = [item for item in plan.items if item.dest_index.fqn != "b"]
        return plan


class Watching:
    def create_global_plan(self, global_plan):
        self.counts = [len(plan.items) for plan in global_plan]
        return super().create_global_plan(global_plan)


class Finishing:
    def finish_plan(self, new_plan):
        new_plan.items.reverse()
        return super().finish_plan(new_plan)


@on_ranks(2)
def test_derived_classes_load_as_they_do_over_torchs_planner(rank, tmp_path):
    state = {"a": torch.ones(3), "b": torch.ones(3), "n": 5}
    dcp.save(state, storage_writer=StorageWriter(tmp_path))
    for mixin in (Scaled, Skipping, Watching, Finishing):
        results = []
        for base in (LoadPlanner, DefaultLoadPlanner):
            planner = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})()
            into = {"a": torch.zeros(3), "b": torch.zeros(3), "n": None}
            dcp.load(into, storage_reader=StorageReader(tmp_path), planner=planner)
            results.append([into, [getattr(planner, name, None) for name in ("looked", "counts")]])
        assert differences(*results) == [], mixin


@on_ranks(2)
def test_plan_that_gets_lost_is_an_error_on_all_ranks(rank, tmp_path):
    """Lose the plan that comes back, as no program does."""
    dcp.save({"a": torch.ones(2)}, storage_writer=StorageWriter(tmp_path))

    class Forgetful(StorageReader):
        def prepare_local_plan(self, plan):
            plan = super().prepare_local_plan(plan)
            if rank == 1:
                plan.items.content.token = "another"
            return plan

    with pytest.raises(CheckpointException, match="does not know"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=Forgetful(tmp_path), planner=LoadPlanner())
    into = {"a": torch.zeros(2)}
    dcp.load(into, storage_reader=StorageReader(tmp_path), planner=LoadPlanner())
    assert torch.equal(into["a"], torch.ones(2))


def test_planner_pickles_in_mid_load():
    planner = LoadPlanner(strict=False)
    planner._planned = _plan_columns.read_items([])
    assert pickle.loads(pickle.dumps(planner)).allow_partial_load


@on_ranks(2)
def test_one_tensor_of_another_shape_is_named(rank, tmp_path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(many(mesh, 3), storage_writer=StorageWriter(tmp_path))
    into = many(mesh, 3)
    into["layer.2"] = torch.zeros(5, 5)
    for planner in (LoadPlanner(), LoadPlanner(strict=False)):
        with pytest.raises(CheckpointException, match=r"layer\.2 is \[5, 5\] here"):
            dcp.load(dict(into), storage_reader=StorageReader(tmp_path), planner=planner)
