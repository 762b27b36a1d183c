"""A rank that sees late what another host has saved waits for it, if other ranks load with it."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
import ringstow.dcp
from ringstow import _late, _native
from ringstow.dcp import _absence, _private

STATE = {"a": torch.arange(10.0)}


def load_late(rank, path, hidden, comes):
    """Load while rank 1's disk shows the checkpoint only after its third look."""
    looks, now = 0, 0.0

    def sleep(seconds):
        nonlocal looks, now
        looks, now = looks + 1, now + 1.0
        if rank == 1 and looks == 3 and comes:
            hidden.rename(path[1])

    before = _late.time, _native.shared_file_system

    class Time:
        pass

    _late.time, time = Time, _late.time
    Time.sleep, Time.monotonic = staticmethod(sleep), staticmethod(lambda: now)
    _native.shared_file_system = lambda path: "nfs4"
    try:
        state = {"a": torch.zeros(10)}
        dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path[rank]))
        return looks, state["a"].sum().item()
    except CheckpointException as error:
        return looks, str(error)
    finally:
        _late.time, _native.shared_file_system = before
        assert time is before[0]


def test_rank_waits_for_the_checkpoint_that_others_see(ranks, tmp_path):
    paths, hidden = [tmp_path / "rank 0/step-1", tmp_path / "rank 1/step-1"], tmp_path / "hidden"
    ringstow.save(STATE, paths[0])
    shutil.copytree(paths[0], hidden)
    paths[1].parent.mkdir()
    assert ranks(2).run(load_late, paths, hidden, True) == [(0, 45.0), (3, 45.0)]


def test_rank_that_never_sees_the_checkpoint_says_what_may_be_late(ranks, tmp_path):
    path = [tmp_path / "rank 0/step-1", tmp_path / "rank 1/step-1"]
    ringstow.save(STATE, path[0])
    path[1].parent.mkdir()
    one, other = ranks(2).run(load_late, path, None, False)
    assert (one[0], other[0]) == (0, 90)
    for _, said in (one, other):
        # Older versions of torch hide the reason, which the log has.
        assert "step-1" in said or "metadata is None" in said


def load_nothing(rank, path):
    """Load what is nowhere; return how often this rank looked again."""
    before = _late.time, _native.shared_file_system
    looks, now = 0, 0.0
    key = f"{_absence._KEY}/{_absence._loads[path] + 1}/{path}"

    def sleep(seconds):
        nonlocal looks, now
        looks, now = looks + 1, now + 1.0
        until = time.monotonic() + 30
        while _private.group_count(key, 0) < 2 and time.monotonic() < until:
            time.sleep(0.001)  # the other rank has not looked yet

    class Time:
        pass

    Time.sleep, Time.monotonic = staticmethod(sleep), staticmethod(lambda: now)
    _late.time, _native.shared_file_system = Time, lambda path: "nfs4"
    try:
        dcp.load({"a": torch.zeros(10)}, storage_reader=ringstow.dcp.StorageReader(path))
    except CheckpointException:
        return looks
    finally:
        _late.time, _native.shared_file_system = before


def test_ranks_do_not_wait_for_what_none_of_them_sees(ranks, tmp_path):
    """Regression: they waited for 90 s for a checkpoint that never was."""
    for path in (tmp_path / "none", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert max(ranks(2).run(load_nothing, str(path))) <= 1


def test_reader_alone_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "shared_file_system", lambda path: "nfs4")
    monkeypatch.setattr(_late.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(FileNotFoundError):
        ringstow.dcp.StorageReader(tmp_path / "none").read_metadata()
