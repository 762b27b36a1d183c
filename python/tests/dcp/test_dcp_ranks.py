"""Several ranks over gloo: shards, failures on one rank, every kind of background save."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support import assert_same, litter, manifest_of
from test_dcp_async import background
from test_dcp_writer import Failing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_has import (
    needs_async_stager,
    needs_background_process,
    needs_no_dist,
    needs_plan_caching,
    needs_use_collectives,
)

import ringstow
from ringstow._ranks._giving_up import StoppedError
from ringstow.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam

SECONDS = 240


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shards(fill=1.0, rows=5):
    """Return a state of sharded, replicated and plain tensors, equal on every rank."""
    whole = torch.arange(rows * 3.0).reshape(rows, 3) * fill
    return {
        "rows": distribute(whole, Shard(0)),
        "columns": distribute(whole + 1, Shard(1)),
        "copies": distribute(whole + 2, Replicate()),
        "one row": distribute(whole[:1] + 3, Shard(0)),
        "empty": distribute(whole[:0], Shard(0)),
        "plain": whole + 4,
        "scalar": torch.tensor(fill),
        "n": [{"lr": fill}],
    }


def distribute(whole, placement):
    """Return a DTensor of a tensor that is equal on every rank."""
    return distribute_tensor(whole.clone(), mesh(), [placement])


def zeros_like(state):
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(item) for key, item in state.items()}
    return [zeros_like(item) for item in state] if isinstance(state, list) else None


def local(state):
    """Return the state with this rank's local tensors instead of the DTensors."""
    if isinstance(state, DTensor):
        state = state.to_local()
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: local(item) for key, item in state.items()}
    return [local(item) for item in state] if isinstance(state, list) else state


def save(state, path, **options):
    writer = options.pop("writer", None) or StorageWriter()
    return dcp.save(state, checkpoint_id=path, storage_writer=writer, **options)


def check(path, expected, **options):
    found = zeros_like(expected)
    dcp.load(found, checkpoint_id=path, storage_reader=StorageReader(), **options)
    assert_same(local(found), local(expected))


def failure(function):
    """Run a save or load that fails; return the errors by rank, which are equal on all ranks."""
    with pytest.raises(CheckpointException) as caught:
        function()
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def _round_trip(rank, path):
    state = shards()
    metadata = save(state, path)
    check(path, state)
    assert metadata.storage_data is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_come_back(world_size, ranks, tmp_path):
    ranks(world_size).run(_round_trip, tmp_path)
    manifest = manifest_of(tmp_path)
    assert manifest["world_size"] == world_size
    chunks = {tensor["name"]: len(tensor["chunks"]) for tensor in manifest["tensors"]}
    assert chunks["rows"] == chunks["columns"] == world_size
    assert {chunks[name] for name in ("copies", "plain", "scalar", "one row", "empty")} == {1}
    assert litter(tmp_path) == [".metadata"]


def _load_only(rank, path):
    check(path, shards())


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_loads_them(world_size, ranks, tmp_path):
    ranks(2).run(_round_trip, tmp_path)
    ranks(world_size).run(_load_only, tmp_path)


@on_ranks(2)
def test_tree_includes_keys_of_other_ranks(rank, tmp_path):
    state = {"by rank": {str(rank): torch.full((3,), float(rank))}}
    save(state, tmp_path)
    check(tmp_path, state)
    assert set(manifest_of(tmp_path)["state"]["by rank"]) == {"0", "1"}


class FailingOn(Failing):
    def __init__(self, rank, moment):
        super().__init__(moment if dist.get_rank() == rank else "never")


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("moment", ["create_local_plan", "finish_plan", "resolve_data"])
@on_ranks(2)
def test_failure_on_one_rank_fails_on_all(rank, tmp_path, bad, moment):
    writer = StorageWriter()
    state = shards()
    save(state, tmp_path, writer=writer)
    broken = shards(fill=9.0)
    errors = failure(lambda: save(broken, tmp_path, writer=writer, planner=FailingOn(bad, moment)))
    assert list(errors) == [bad]
    assert f"failed in {moment}" in str(errors[bad])
    check(tmp_path, state)  # the group works, and the earlier checkpoint is intact
    save(broken, tmp_path, writer=writer)
    check(tmp_path, broken)
    kind = "InvalidStateError" if moment == "resolve_data" else "RuntimeError"
    assert type(errors[bad]).__name__ == kind
    dist.barrier()
    assert litter(tmp_path) == [".metadata"]


@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(2)
def test_full_disk_on_one_rank_fails_every_rank(rank, tmp_path, bad):
    writer = StorageWriter()
    save({"a": torch.ones(3)}, tmp_path, writer=writer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        state = {str(n): torch.ones(1 << 20) for n in range(2)}
        errors = failure(lambda: save(state, tmp_path, writer=writer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(type(errors[rank]) is StoppedError for rank in set(errors) - {bad})
    check(tmp_path, {"a": torch.ones(3)})
    save(state, tmp_path, writer=writer)
    check(tmp_path, state)
    assert (type(errors[bad]), errors[bad].errno) == (OSError, 27)


@on_ranks(2)
def test_busy_directory_fails_every_rank(rank, tmp_path):
    if rank == 0:
        hold = ringstow._native.Session(str(tmp_path), 1, ringstow.Config().to_json())
    dist.barrier()
    errors = failure(lambda: save({"a": torch.ones(2)}, tmp_path))
    assert type(errors[0]) is ringstow.BusyError
    dist.barrier()
    if rank == 0:
        hold.abandon()
    save({"a": torch.ones(2)}, tmp_path)


@pytest.mark.parametrize("how", ["snapshot", pytest.param("streaming", marks=needs_async_stager)])
@on_ranks(2)
def test_background_saves_keep_the_values_of_the_call(rank, tmp_path, how):
    group = dist.new_group(backend="gloo")
    writer = StorageWriter()
    stager = writer.stager() if how == "streaming" else None
    for step in (1.0, 2.0):
        state = shards(fill=step)
        expected = local(state)
        staging, upload = background(
            state, tmp_path / str(step), writer, stager, process_group=group
        )
        if how == "streaming":
            staging.result(SECONDS)
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        dist.barrier()  # training continues on its own process group
        upload.result(SECONDS)
        found = shards()
        dcp.load(found, checkpoint_id=tmp_path / str(step), storage_reader=StorageReader())
        assert_same(local(found), expected)
    writer.close()


@pytest.mark.parametrize("how", ["snapshot", pytest.param("streaming", marks=needs_async_stager)])
@on_ranks(2)
def test_background_failure_on_one_rank_fails_on_all(rank, tmp_path, how):
    group = dist.new_group(backend="gloo")
    writer = StorageWriter()
    stager = writer.stager() if how == "streaming" else None

    options = {"process_group": group}
    planner = FailingOn(1, "finish_plan")
    staging, upload = background(shards(), tmp_path, writer, stager, planner=planner, **options)
    if how == "streaming":
        # Rank 0 staged its part before rank 1 failed.
        assert (staging.exception(SECONDS) is None) == (rank == 0)
    assert list(upload.exception(SECONDS).failures) == [1]
    background(shards(), tmp_path, writer, stager, **options)[1].result(SECONDS)
    check(tmp_path, shards())


@needs_background_process
@needs_async_stager
@on_ranks(1)  # its process imports torch; test_dcp_as_torch has such saves by two ranks
def test_async_save_in_a_process_works(rank, tmp_path):
    from torch.distributed.checkpoint import _async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    writer = StorageWriter()
    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    try:
        for step in (1.0, 2.0):
            state = {"a": torch.full((1000,), step), "n": step}
            background(state, tmp_path / str(step), writer, **options)[1].result(SECONDS)
        _, upload = background(state, "s3://no/path", writer, **options)
        assert "is not a path" in str(upload.exception(SECONDS))
        for future in background(state, tmp_path / "live", writer, writer.stager(), **options):
            future.result(SECONDS)
    finally:
        executor._CHECKPOINT_PROCESS = None  # ends the process
    for name, step in (("1.0", 1.0), ("2.0", 2.0), ("live", 2.0)):
        check(tmp_path / name, {"a": torch.full((1000,), step), "n": step})


@needs_use_collectives
@on_ranks(2)
def test_each_rank_has_a_checkpoint_without_collectives(rank, tmp_path):
    state = {"own": torch.full((4,), float(rank)), "n": rank}
    for _ in range(2):
        save(state, tmp_path, use_collectives=False)
    check(tmp_path, state)
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["rank00000", "rank00001"]
    check(tmp_path / f"rank0000{rank}", state, no_dist=True)


@on_ranks(3)
def test_subgroup_of_ranks_saves(rank, tmp_path):
    group = dist.new_group([1, 2], backend="gloo")
    if rank:
        state = {str(rank): torch.full((3,), float(rank)), "both": torch.ones(2)}
        save(state, tmp_path, process_group=group)
        check(tmp_path, state, process_group=group)
        assert manifest_of(tmp_path)["world_size"] == 2
    dist.barrier()


class OlderWriter(StorageWriter):
    """torch 2.6 does not pass the rank."""

    def set_up_storage_writer(self, is_coordinator):
        super().set_up_storage_writer(is_coordinator)


@on_ranks(3)
def test_subgroup_saves_if_torch_passes_no_rank(rank, tmp_path):
    group = dist.new_group([1, 2], backend="gloo")
    if rank:
        state = {str(rank): torch.full((3,), float(rank))}
        save(state, tmp_path, process_group=group, writer=OlderWriter())
        check(tmp_path, state, process_group=group)
    dist.barrier()


@needs_no_dist
@on_ranks(2)
def test_without_distribution_each_process_saves_for_itself(rank, tmp_path):
    state = {"a": torch.full((3,), float(rank))}
    save(state, tmp_path / str(rank), no_dist=True)
    check(tmp_path / str(rank), state, no_dist=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(2)
def test_another_rank_than_the_first_coordinates(rank, tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save_state_dict

    for fill in (1.0, 2.0):  # the second replaces the first
        state = {key: value for key, value in shards(fill).items() if key != "n"}  # no nesting here
        save_state_dict(state, StorageWriter(tmp_path), coordinator_rank=1)
        found = zeros_like(state)
        load_state_dict(found, StorageReader(tmp_path, broadcast=True), coordinator_rank=1)
        assert_same(local(found), local(state))
    check(tmp_path, state)
    dist.barrier()
    assert litter(tmp_path) == [".metadata"]


@needs_plan_caching
@on_ranks(2)
def test_cached_plans_save_current_values(rank, tmp_path):
    writer, planner = StorageWriter(), partial(DefaultSavePlanner, enable_plan_caching=True)

    try:
        for step in (1.0, 2.0, 3.0):
            state = shards(fill=step)
            save(state, tmp_path / str(step), writer=writer, planner=planner())
            check(tmp_path / str(step), state)
        errors = failure(
            lambda: save({"rows": torch.ones(1)}, "/proc/no", writer=writer, planner=planner())
        )
        assert isinstance(errors[0], OSError)
        bigger = shards(fill=4.0, rows=7)
        save(bigger, tmp_path / "bigger", writer=writer, planner=planner())
        check(tmp_path / "bigger", bigger)
    finally:
        for cache in (n for n in vars(dcp.SavePlanner) if n.startswith("_cached")):
            getattr(dcp.SavePlanner, cache).clear()


@on_ranks(2)
def test_several_shards_of_a_tensor_on_one_rank(rank, tmp_path):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n % 2}/cpu" for n in range(4)])
    whole = torch.arange(21.0).reshape(7, 3)

    def part_of(shard):
        start = shard.metadata.shard_offsets[0]
        return whole[start : start + shard.metadata.shard_sizes[0]]

    tensor, loaded = (sharded_tensor.zeros(spec, 7, 3) for _ in range(2))
    assert len(tensor.local_shards()) == 2
    for shard in tensor.local_shards():
        shard.tensor.copy_(part_of(shard))
    group = dist.new_group(backend="gloo")
    _, upload = background({"a": tensor}, tmp_path, StorageWriter(), process_group=group)
    for shard in tensor.local_shards():
        shard.tensor.zero_()
    upload.result(SECONDS)
    dcp.load({"a": loaded}, checkpoint_id=tmp_path, storage_reader=StorageReader())
    for shard in loaded.local_shards():
        assert_same(shard.tensor, part_of(shard))
    target = {"a": torch.zeros(7, 3)}
    dcp.load(target, checkpoint_id=tmp_path, storage_reader=StorageReader())
    assert_same(target["a"], whole)


@on_ranks(2)
def test_mismatch_on_one_rank_fails_every_rank(rank, tmp_path):
    from ringstow.dcp import LoadPlanner

    save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    target = {"a": torch.zeros(3 if rank else 2), "b": torch.zeros(2)}
    options = {"storage_reader": StorageReader(), "planner": LoadPlanner()}
    errors = failure(lambda: dcp.load(target, checkpoint_id=tmp_path, **options))
    assert list(errors) == [1]
    assert errors[1].mismatched == ["a is [3] here and [2] in the checkpoint"]


def _die(rank, path):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_dead_rank_is_noticed_and_replaced(ranks, tmp_path):
    with pytest.raises(RuntimeError, match="rank"):
        ranks(2).run(_die, tmp_path)
    ranks(2).run(_round_trip, tmp_path)


def _types(rank, path):
    assert isinstance(path, pathlib.Path)
    raise ringstow.BusyError("as it is", path=str(path)) if rank else KeyError("lowest")


def test_error_of_the_lowest_rank_is_raised_unchanged(ranks, tmp_path):
    with pytest.raises(KeyError, match="lowest"):
        ranks(2).run(_types, tmp_path)
