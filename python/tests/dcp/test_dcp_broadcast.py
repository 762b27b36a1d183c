"""One rank reads what several need: equal results, fewer bytes, and no rank hangs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support import assert_same, shards_of
from test_dcp_ranks import failure, local, save, shards, zeros_like
from test_dcp_reader import Weird
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch_has import takes

import ringstow
from ringstow.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam

CONFIG = ringstow.Config(pool_bytes=8 << 20, block_bytes=64 << 10)
NBYTES = 12 << 20


def replicated():
    """Return a state that is the same on every rank and larger than a batch."""
    numbers = torch.arange(NBYTES // 4, dtype=torch.int32)
    return {
        "whole": numbers.reshape(-1, 1024),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.linspace(-1, 1, 777).to(torch.bfloat16),
        "object": {"text": "ü" * 1000, "n": [1, 2]},
    }


def load(path, state, reader=None, **options):
    """Load into zeros; return the loaded state and the bytes that this rank read."""
    found = zeros_like(state)
    reader = reader or StorageReader(config=CONFIG, broadcast=True)
    dcp.load(found, checkpoint_id=path, storage_reader=reader, **options)
    return found, reader.report.read_bytes - reader.report.received_bytes


def _replicated(rank, path):
    state = replicated()
    save(state, path, writer=StorageWriter(config=CONFIG))
    alone, alone_bytes = load(path, state, StorageReader(config=CONFIG))
    found, nbytes = load(path, state)
    assert_same(found, state)
    assert_same(alone, state)
    return alone_bytes, nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicated_data_is_read_about_once(world_size, ranks, tmp_path):
    alone, together = zip(*ranks(world_size).run(_replicated, tmp_path), strict=True)
    assert sum(alone) >= world_size * NBYTES
    assert NBYTES <= sum(together) < NBYTES * 1.1
    assert max(together) < NBYTES * 1.1 / world_size + (2 << 20)


def _mixed(rank, path):
    state = {**shards(rows=500), "replicated": replicated()}
    save(state, path)
    found, _ = load(path, state)
    assert_same(local(found), local(state))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mix_of_sharded_and_replicated(world_size, ranks, tmp_path):
    ranks(world_size).run(_mixed, tmp_path)


@on_ranks(2)
def test_ranks_may_request_other_dtypes_and_keys(rank, tmp_path):
    values = torch.arange(3_000_000.0)
    save({"a": values, "tied": values, "only": torch.ones(3)}, tmp_path)
    tied = torch.zeros(3_000_000, dtype=torch.float64 if rank else torch.float32)
    state = {"a": tied[::1], "tied": tied}
    if rank:
        state["only"] = torch.zeros(6)[::2]
    dcp.load(state, checkpoint_id=tmp_path, storage_reader=StorageReader(broadcast=True))
    assert_same(tied, values.to(tied.dtype))
    assert not rank or state["only"].tolist() == [1, 1, 1]


def _damage(rank, path, bad):
    """Flip a bit in the first bytes, or the last."""
    dist.barrier()
    if rank == 0:
        shard = max(shards_of(path), key=lambda file: file.stat().st_size)
        raw = bytearray(shard.read_bytes())
        raw[(len(raw) - 4096) * bad + 2048] ^= 1
        shard.write_bytes(raw)
    dist.barrier()


@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(2)
def test_damage_is_the_error_of_every_rank_as_if_it_read_alone(rank, tmp_path, bad):
    state = {"whole": replicated()["whole"]}
    save(state, tmp_path)
    _damage(rank, tmp_path, bad)
    errors = failure(lambda: load(tmp_path, state))
    alone = failure(lambda: load(tmp_path, state, StorageReader(config=CONFIG)))
    for one in (0, 1):
        assert type(errors[one]) is ringstow.CorruptCheckpointError
        assert str(errors[one]) == str(alone[one])
    save(state, tmp_path)
    assert_same(load(tmp_path, state)[0], state)  # the group works


class Planner(DefaultLoadPlanner):
    """Returns a read-only target, or one of a wrong shape, on rank 1."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def resolve_tensor(self, item):
        tensor = super().resolve_tensor(item)
        if dist.get_rank() != 1:
            return tensor
        if self.how == "shape":
            return tensor[:1]
        return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("how", ["shape", "expanded"])
@on_ranks(2)
def test_failure_on_a_receiving_rank_fails_every_rank(rank, tmp_path, how):
    state = {"whole": replicated()["whole"]}
    save(state, tmp_path)
    errors = failure(lambda: load(tmp_path, state, planner=Planner(how)))
    assert sorted(errors) == [1]  # as without broadcast
    assert_same(load(tmp_path, state)[0], state)


@on_ranks(2)
def test_objects_need_allow_pickle_with_broadcast_too(rank, tmp_path):
    writer = StorageWriter(allow_pickle=True)
    dcp.save({"a": Weird(), "w": torch.ones(9)}, checkpoint_id=tmp_path, storage_writer=writer)
    state = {"a": None, "w": torch.zeros(9)}
    reader = StorageReader(broadcast=True)
    errors = failure(lambda: dcp.load(state, checkpoint_id=tmp_path, storage_reader=reader))
    assert [type(error) for error in errors.values()] == [ringstow.UnsupportedError] * 2
    assert state["w"].sum() == 0
    reader = StorageReader(broadcast=True, allow_pickle=True)
    assert type(load(tmp_path, {"a": None}, reader)[0]["a"]) is Weird


@on_ranks(2)
def test_broadcast_on_some_ranks_only_is_not_used(rank, tmp_path):
    state = {"a": torch.arange(5.0)}
    if takes(dcp.save, "use_collectives"):
        save(state, tmp_path / "local", use_collectives=False)
        assert_same(load(tmp_path / "local", state)[0], state)
    if takes(dcp.save, "no_dist"):
        save(state, tmp_path / str(rank), no_dist=True)
        assert_same(load(tmp_path / str(rank), state, no_dist=True)[0], state)
    save(state, tmp_path / "c")
    some = StorageReader(broadcast=rank == 0)
    assert_same(load(tmp_path / "c", state, some)[0], state)


@on_ranks(3)
def test_a_group_of_some_ranks(rank, tmp_path):
    group = dist.new_group([2, 1], backend="gloo")
    state = replicated()
    if rank:
        save(state, tmp_path, process_group=group, writer=StorageWriter(config=CONFIG))
        reader = StorageReader(config=CONFIG, broadcast=group)
        found, nbytes = load(tmp_path, state, reader, process_group=group)
        assert_same(found, state)
        assert nbytes < NBYTES
        errors = failure(lambda: load(tmp_path, state, process_group=group))
        assert type(errors[0]) is ringstow.InvalidStateError
    dist.barrier()
