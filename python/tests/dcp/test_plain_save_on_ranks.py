"""Plain `ringstow.save` in a torch.distributed job with several ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from support import logged

import ringstow
from ringstow import _native
from ringstow._ranks import _concurrent_saves

STATE = {"a": torch.arange(10.0)}


def _in_turn(rank, path, how, order):
    """Save on one rank, then on the other; return both errors."""
    errors = []
    for turn in order:
        error = None
        if turn == rank:
            try:
                if how == "save":
                    ringstow.save({"rank": rank}, path)
                else:
                    ringstow.save_async({"rank": rank}, path).result()
            except ringstow.Error as caught:
                error = caught
            errors.append(error)
        dist.barrier()
    return errors[0]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_rank_does_not_replace_a_save_of_another_rank(how, ranks, tmp_path):
    first, second = ranks(2).run(_in_turn, tmp_path / "c", how, (0, 1))
    assert first is None
    assert type(second) is ringstow.InvalidStateError
    for advice in ("rank 1 of 2", "rank 0 only", "a path for each rank", "ringstow.dcp"):
        assert advice in str(second)
    assert ringstow.load(tmp_path / "c") == {"rank": 0}


def _rank_0_comes_last(rank, path):
    with logged() as said:
        assert _in_turn(rank, path, "save", (1, 0)) is None
    return said


def test_rank_0_replaces_it_and_warns(ranks, tmp_path):
    (said,), nothing = ranks(2).run(_rank_0_comes_last, tmp_path / "c")
    assert "was saved by another process while this one ran" in said
    assert nothing == []
    assert ringstow.load(tmp_path / "c") == {"rank": 0}


def _beside_a_save(rank, path):
    error = session = None
    if rank == 0:
        session = _native.Session(path, 1, ringstow.Config().to_json())
    dist.barrier()
    if rank == 1:
        try:
            ringstow.save(STATE, path)
        except ringstow.BusyError as caught:
            error = caught
    dist.barrier()
    if session is not None:
        session.abandon()
    return error


def test_concurrent_saves_of_ranks_raise_with_advice(ranks, tmp_path):
    _, error = ranks(2).run(_beside_a_save, str(tmp_path / "c"))
    assert type(error) is ringstow.BusyError
    assert error.path == str(tmp_path / "c")
    for advice in ("rank 1 of 2", "rank 0 only", "a path for each rank", "ringstow.dcp"):
        assert advice in str(error)


def _again_and_again(rank, path):
    mine = os.path.join(path, f"rank{rank}")
    latest = os.path.join(path, "latest")
    for step in range(3):
        ringstow.save({"step": step}, mine)
        if rank == 0:
            ringstow.save({"step": step}, latest)


def test_advised_calls_work_repeatedly(ranks, tmp_path):
    ranks(2).run(_again_and_again, str(tmp_path))
    for name in ("rank0", "rank1", "latest"):
        assert ringstow.load(tmp_path / name) == {"step": 2}


def _over_an_earlier_runs(rank, path):
    if rank == 1:
        ringstow.save({"run": "later"}, path)


def test_checkpoint_of_an_earlier_run_is_replaced(ranks, tmp_path):
    ringstow.save({"run": "earlier"}, tmp_path / "c")
    os.utime(tmp_path / "c" / "manifest.json", (1, 1))
    ranks(2).run(_over_an_earlier_runs, tmp_path / "c")
    assert ringstow.load(tmp_path / "c") == {"run": "later"}


def test_single_process_skips_the_check(tmp_path):
    ringstow.save({"n": 1}, tmp_path / "c")
    _concurrent_saves._saved.clear()  # as in another process
    ringstow.save({"n": 2}, tmp_path / "c")
    assert ringstow.load(tmp_path / "c") == {"n": 2}


def test_process_start_time_is_known():
    import time

    before = time.time()
    _concurrent_saves._started.cache_clear()
    assert 0 < before - _concurrent_saves._started() < 24 * 3600
