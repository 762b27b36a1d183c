"""Plain `ringstow.save` in a torch.distributed job with several ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from support import logged

import ringstow
from ringstow import _native
from ringstow._ranks import _concurrent_saves

ADVICE = ("rank 1 of 2", "rank 0 only", "a path for each rank", "ringstow.dcp")


def save_async(state, path):
    ringstow.save_async(state, path).result()


def in_turn(rank, path, order, save=ringstow.save):
    """Save on one rank, then on the other; return what this one raises."""
    for turn in order:
        if turn == rank:
            said = raised(lambda: save({"rank": rank}, path))
        dist.barrier()
    return said


@pytest.mark.parametrize("save", [ringstow.save, save_async])
@on_ranks(2)
def test_rank_does_not_replace_a_save_of_another_rank(rank, tmp_path, save):
    said = in_turn(rank, tmp_path / "c", (0, 1), save)
    if rank == 0:
        assert said is None
    else:
        assert said[0] == "InvalidStateError"
        assert [advice for advice in ADVICE if advice not in said[1]] == []
    assert ringstow.load(tmp_path / "c") == {"rank": 0}


@on_ranks(2)
def test_rank_0_replaces_it_and_warns(rank, tmp_path):
    with logged() as said:
        assert in_turn(rank, tmp_path / "c", (1, 0)) is None
    assert len(said) == (rank == 0)
    assert rank or "was saved by another process while this one ran" in said[0]
    assert ringstow.load(tmp_path / "c") == {"rank": 0}


@on_ranks(2)
def test_concurrent_saves_of_ranks_raise_with_advice(rank, tmp_path):
    path = str(tmp_path / "c")
    if rank == 0:
        session = _native.Session(path, 1, ringstow.Config().to_json())
        dist.barrier()
        dist.barrier()
        session.abandon()
        return
    dist.barrier()
    with pytest.raises(ringstow.BusyError) as caught:
        ringstow.save({"a": torch.arange(10.0)}, path)
    dist.barrier()
    assert (caught.type, caught.value.path) == (ringstow.BusyError, path)
    assert [advice for advice in ADVICE if advice not in str(caught.value)] == []


@on_ranks(2)
def test_advised_calls_work_repeatedly(rank, tmp_path):
    for step in range(3):
        ringstow.save({"step": step}, tmp_path / f"rank{rank}")
        if rank == 0:
            ringstow.save({"step": step}, tmp_path / "latest")
    dist.barrier()
    for name in ("rank0", "rank1", "latest"):
        assert ringstow.load(tmp_path / name) == {"step": 2}


@on_ranks(2)
def test_checkpoint_of_an_earlier_run_is_replaced(rank, tmp_path):
    if rank == 0:
        ringstow.save({"run": "earlier"}, tmp_path / "c")
        os.utime(tmp_path / "c" / "manifest.json", (1, 1))
    dist.barrier()
    if rank == 1:
        ringstow.save({"run": "later"}, tmp_path / "c")
    dist.barrier()
    assert ringstow.load(tmp_path / "c") == {"run": "later"}


def test_single_process_skips_the_check(tmp_path):
    ringstow.save({"n": 1}, tmp_path / "c")
    _concurrent_saves._saved.clear()  # as in another process
    ringstow.save({"n": 2}, tmp_path / "c")
    assert ringstow.load(tmp_path / "c") == {"n": 2}


def test_process_start_time_is_known():
    before = time.time()
    _concurrent_saves._started.cache_clear()
    assert 0 < before - _concurrent_saves._started() < 24 * 3600
