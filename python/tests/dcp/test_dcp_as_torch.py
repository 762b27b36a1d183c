"""DCP's promises for any storage: with torch's own, and with ours through `use_by_default()`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import HIDDEN, INPUT, Model, _whole, differences
from ranks import on_ranks
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import init_device_mesh
from torch_has import needs_background_process, needs_staging_options

import ringstow.dcp

pytestmark = pytest.mark.torch_seam

STORAGES = ["torch", "ringstow"]


def chosen(storage):
    """Return a context in which DCP saves and loads with a storage."""
    return contextlib.nullcontext() if storage == "torch" else ringstow.dcp.use_by_default()


@pytest.fixture(params=STORAGES)
def storage(request, tmp_path):
    with chosen(request.param):
        yield request.param
    ours = any(tmp_path.rglob("manifest.json"))
    stock = any(tmp_path.rglob("*.distcp"))
    assert (ours, stock) == ((False, stock) if request.param == "torch" else (ours, False))


# A complete training run: model, optimizer, a stateful object, and a state that holds a BytesIO.


class Noise:
    def __init__(self):
        self.data = torch.rand(10, 10)

    def state_dict(self):
        return {"data": self.data}

    def load_state_dict(self, state):
        self.data = state["data"]


@dataclasses.dataclass
class Progress:
    step: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)

    def state_dict(self):
        blob = io.BytesIO()
        torch.save(self.losses, blob)
        return {"step": torch.tensor(self.step), "losses": blob}

    def load_state_dict(self, state):
        self.step = int(state["step"])
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


def _model(kind):
    torch.manual_seed(0)
    model = Model(HIDDEN)
    cpu = {"device_id": torch.device("cpu"), "use_orig_params": True}
    size = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        model = FullyShardedDataParallel(model, device_mesh=init_device_mesh("cpu", (size,)), **cpu)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2))
        hybrid = ShardingStrategy.HYBRID_SHARD
        model = FullyShardedDataParallel(model, device_mesh=mesh, sharding_strategy=hybrid, **cpu)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if kind != "plain":
        _patch_model_state_dict(model)
        _patch_optimizer_state_dict(model, optimizers=optimizer)
    return model, optimizer


def _train(model, optimizer, steps):
    torch.manual_seed(1)  # the same batches on every rank in every layout
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, INPUT)).square().sum()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _state(kind):
    model, optimizer = _model(kind)
    return {"model": model, "optimizer": optimizer, "noise": Noise(), "progress": Progress()}


def _resumed(rank, storage, path, kind, save):
    """Train, save, load and resume; compare with an uninterrupted run."""
    with chosen(storage):
        state = _state(kind)
        state["progress"].losses = _train(state["model"], state["optimizer"], 2)
        state["progress"].step = 2
        save(state, path)
        again = _state(kind)
        dcp.load(again, checkpoint_id=path)
    assert torch.equal(state["noise"].data, again["noise"].data)
    assert again["progress"] == state["progress"]
    went_on, resumed = (_train(s["model"], s["optimizer"], 1) for s in (state, again))
    assert went_on == resumed
    parts = [get_state_dict(s["model"], optimizers=s["optimizer"]) for s in (state, again)]
    whole = [[_whole(part) for part in pair] for pair in parts]
    return differences(*whole) if rank == 0 else []


def _at_once(state, path):
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_resumed_training_equals_uninterrupted_one(ranks, tmp_path, storage, kind, world):
    differences = ranks(world).run(_resumed, storage, tmp_path, kind, _at_once)
    assert not any(differences)


class InBackground:
    """Saves in the background, in one of torch's modes."""

    def __init__(self, kind, *, is_cached, is_streamed):
        self.kind, self.is_cached, self.is_streamed = kind, is_cached, is_streamed

    def __call__(self, state, path):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType[self.kind]
        writer = dcp.FileSystemWriter(path, cache_staged_state_dict=self.is_cached)
        stager = None
        if not self.is_cached:
            is_shared = self.kind == "PROCESS"
            stager = DefaultStager(StagingOptions(self.is_streamed, is_shared, False, False))
        found = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
        )
        getattr(found, "upload_completion", found).result(60)


@needs_background_process
@needs_staging_options
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
@pytest.mark.parametrize(
    ("is_cached", "is_streamed"), [(False, False), (True, False), (False, True)]
)
def test_background_saves_resume_equally(ranks, tmp_path, storage, kind, is_cached, is_streamed):
    if is_cached and storage == "torch" and not torch.cuda.is_available():
        pytest.skip("torch's own cache is pinned memory, which needs a GPU")
    save = InBackground(kind, is_cached=is_cached, is_streamed=is_streamed)
    assert not any(ranks(2).run(_resumed, storage, tmp_path, "fsdp", save))


# The state dict.


class Counting(dict):
    sets = 0

    def __setitem__(self, key, value):
        self.sets += 1
        super().__setitem__(key, value)


def test_stateful_object_is_filled_not_replaced(storage, tmp_path):
    class Empty:
        loads = 0

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.loads += 1

    state = Counting(a=Empty())
    dcp.save(state, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    assert (state["a"].loads, state.sets) == (1, 0)
    state = Counting(a={"tensor": torch.rand(3), "list": [1, 2]})
    dcp.save(state, checkpoint_id=tmp_path / "2")
    dcp.load(state, checkpoint_id=tmp_path / "2")
    assert state.sets > 0


def test_empty_state_round_trips(storage, tmp_path):
    dcp.save({}, checkpoint_id=tmp_path)
    dcp.load({}, checkpoint_id=tmp_path)


def test_a_state_dict_is_filled_in_place(storage, tmp_path):
    def parts(lr):
        torch.manual_seed(int(lr * 10))
        model = Model(HIDDEN)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        model_state = get_model_state_dict(model)
        optimizer_state = get_optimizer_state_dict(model, optimizer)
        return model, optimizer, {"model": model_state, "optimizer": optimizer_state}

    *_, saved = parts(0.1)
    dcp.save(saved, checkpoint_id=tmp_path)
    model, optimizer, state = parts(0.2)
    before = dict(state)
    dcp.load(state, checkpoint_id=tmp_path)
    assert all(state[key] is before[key] for key in before)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    for key, value in saved["model"].items():
        assert torch.equal(model.state_dict()[key], value)


def test_some_keys_of_a_checkpoint_load_alone(storage, tmp_path):
    model = nn.Linear(2, 3)
    state = {"model": model.state_dict(), "optimizer": {"state": {"a": torch.ones(2)}, "lr": 0.5}}
    dcp.save(state, checkpoint_id=tmp_path)
    other = nn.Linear(2, 3)
    dcp.load({"model": other}, checkpoint_id=tmp_path)
    assert torch.equal(other.weight, model.weight)
    found = _load_state_dict_from_keys("model", checkpoint_id=tmp_path)
    assert found.keys() == {"model"}
    assert torch.equal(found["model"]["weight"], model.weight)
    found = _load_state_dict_from_keys("optimizer.state", checkpoint_id=tmp_path)
    assert found["optimizer"].keys() == {"state"}


@pytest.mark.parametrize("storage", STORAGES)
@on_ranks(2)
def test_ranks_may_order_their_keys_differently(rank, storage, tmp_path):
    class Gathers:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2))

    class Reduces(Gathers):
        def load_state_dict(self, state):
            dist.all_reduce(torch.ones(2))

    state = {"a": Gathers(), "b": Reduces()}
    if rank:
        state = dict(reversed(state.items()))
    with chosen(storage):
        dcp.save(state, checkpoint_id=tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)


# Options of the planners.


def test_another_size_is_refused(storage, tmp_path):
    dcp.save({"module": nn.Linear(2, 2)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"module": nn.Linear(3, 2)}, checkpoint_id=tmp_path)


# The choice of a storage for a path.


def test_invalid_path_raises_torchs_error(storage):
    for call in (dcp.save, dcp.load):
        with pytest.raises(RuntimeError, match="Cannot detect"):
            call({"a": 1}, checkpoint_id="abc://abc.abc")


def test_rejected_path_goes_to_another_storage(storage, tmp_path):
    """Some programs replace `validate_checkpoint_id` to use their own storage."""
    refuse = {"attribute": "validate_checkpoint_id", "return_value": False}
    with (
        patch.object(dcp.FileSystemReader, **refuse),
        patch.object(dcp.FileSystemWriter, **refuse),
        contextlib.suppress(RuntimeError),  # without fsspec, DCP finds no other storage
    ):
        dcp.save({"a": 1}, checkpoint_id=tmp_path / "b")
    assert not (tmp_path / "b" / "manifest.json").exists()
    for file in (tmp_path / "b").glob("*.distcp"):
        file.unlink()


# Sharded tensors that load resharded, and as full tensors.

SPECS = [["rank:0", "rank:1"], ["rank:0", "rank:1", "rank:1", "rank:0"], ["rank:1", "rank:0"]]


@pytest.mark.parametrize("storage", STORAGES)
@on_ranks(2)
def test_sharded_tensors_load_resharded_and_whole(rank, tmp_path, storage):
    torch.manual_seed(7)
    replicated = torch.rand(32)
    specs = [ChunkShardingSpec(dim=0, placements=placements) for placements in SPECS]
    for number, spec in enumerate(specs):
        place = f"{tmp_path}/{number}"
        saved = {"sharded": sharded_tensor.rand(spec, 32), "plain": replicated}
        with chosen(storage):
            dcp.save(saved, checkpoint_id=place)
            for other in specs:
                # Each also loads as the other's kind.
                found = {"sharded": torch.zeros(32), "plain": sharded_tensor.zeros(other, 32)}
                dcp.load(found, checkpoint_id=place)
                same = {"sharded": sharded_tensor.zeros(other, 32), "plain": torch.zeros(32)}
                dcp.load(same, checkpoint_id=place)
                wholes = [_whole(state) for state in (saved, found, same)]
                if rank == 0:
                    assert differences(wholes[0], wholes[1]) == []
                    assert differences(wholes[0], wholes[2]) == []
