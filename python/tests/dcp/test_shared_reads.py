"""Ranks of a host that need the same bytes of a slow disk read them through the page cache."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
from ringstow import distributed
from ringstow.distributed import _shared_reads
from ringstow.distributed._shared_reads import Needs

ROWS = 4096
SLOW, FAST = 1.0, 1e-6


def load(rank, path, seconds, *, sharded=False, config=None):
    """Return whether a load read past the page cache, on a disk whose sample took these seconds."""
    mesh = init_device_mesh("cpu", (2,))
    expected = torch.arange(ROWS * 1024.0).reshape(ROWS, 1024)
    if rank == 0:
        ringstow.save({"w": expected}, path)
    torch.distributed.barrier()
    target = torch.zeros(ROWS, 1024)
    if sharded:
        target = distribute_tensor(target, mesh, [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_shared_reads, "_SHARED_BYTES_MIN", 1 << 20)
        patch.setattr(_shared_reads, "_sample", lambda *_: seconds)
        report = distributed.load_into({"w": target}, path, config=config)
    found = target.full_tensor() if sharded else target
    assert torch.equal(found, expected)
    return report.direct


@on_ranks(2)
def test_replicated_tensors_of_a_slow_disk(rank, tmp_path):
    assert not load(rank, tmp_path / "a", SLOW)
    assert load(rank, tmp_path / "b", FAST)
    # One rank that cannot read past the page cache says nothing about the disk.
    assert load(rank, tmp_path / "c", None if rank else SLOW)


@on_ranks(2)
def test_ranks_that_need_different_bytes_share_nothing(rank, tmp_path):
    assert load(rank, tmp_path / "a", SLOW, sharded=True)


@on_ranks(2)
def test_what_the_caller_says_is_done(rank, tmp_path):
    assert load(rank, tmp_path / "a", SLOW, config=ringstow.Config(direct="on"))


@on_ranks(2)
def test_a_sample_of_a_real_disk_is_taken(rank, tmp_path):
    if rank == 0:
        ringstow.save({"w": torch.randn(4 << 20)}, tmp_path / "a")
    torch.distributed.barrier()
    shard = tmp_path / "a/rank00000-0.safetensors"
    seconds = _shared_reads._sample(shard.stat().st_size, str(shard), rank)
    assert seconds is not None
    assert seconds > 0

    def fails(*_):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.preadv", fails)
        assert _shared_reads._sample(shard.stat().st_size, str(shard), rank) is None
    assert _shared_reads._sample(1 << 30, str(tmp_path), rank) is None


@on_ranks(2)
def test_a_load_of_everything_by_all(rank, tmp_path):
    if rank == 0:
        ringstow.save({"w": torch.ones(4 << 20)}, tmp_path / "a")
    torch.distributed.barrier()
    used = []
    load = distributed._load._load.load
    for seconds in (SLOW, FAST, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_shared_reads, "_SHARED_BYTES_MIN", 1 << 20)
            patch.setattr(_shared_reads, "_sample", lambda *_, seconds=seconds: seconds)
            patch.setattr(
                distributed._load._load,
                "load",
                lambda *args, config, **rest: (
                    used.append(config) or load(*args, config=config, **rest)
                ),
            )
            assert distributed.load(tmp_path / "a")["w"].sum() == 4 << 20
    assert [one and one.direct for one in used] == ["off", None, None]


def test_only_ranks_of_one_host_count():
    unit = 1 << 30
    whole, half = bytes([255] * 4), bytes([255, 255, 0, 0])
    needs = [Needs("a", whole, unit), Needs("a", whole, unit), Needs("b", whole, unit)]
    assert _shared_reads._shared("a", needs) == 2
    assert _shared_reads._shared("b", needs) == 1
    assert _shared_reads._shared("a", [Needs("a", half, unit), Needs("a", half[::-1], unit)]) == 1
    assert _shared_reads._shared("a", [Needs("a", whole, 1)] * 3) == 0


def test_slices_of_one_unit_are_not_the_same_bytes():
    quarter = Needs("a", bytes([64] * 8), 1 << 30)
    assert _shared_reads._shared("a", [quarter] * 4) == pytest.approx(1, abs=0.01)
