"""A rank that sees late what another host has saved waits for it, if other ranks load with it."""

from __future__ import annotations

import contextlib
import shutil
import time
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow._ranks import _shared_fs_lag
from ringstow.dcp import _missing_checkpoint, _private

STATE = {"a": torch.arange(10.0)}


@contextlib.contextmanager
def network(looked=lambda looks: None):
    """Play a network file system on which each further look takes a second; yield the looks."""
    before, looks = (_shared_fs_lag.time, _native.shared_file_system), []

    def sleep(seconds):
        looks.append(seconds)
        looked(len(looks))

    clock = {"monotonic": lambda: float(len(looks)), "time": time.time}
    _shared_fs_lag.time = types.SimpleNamespace(sleep=sleep, **clock)
    _native.shared_file_system = lambda path: "nfs4"
    try:
        yield looks
    finally:
        _shared_fs_lag.time, _native.shared_file_system = before


def load_late(rank, path, hidden, comes):
    """Load while rank 1's disk shows the checkpoint only after its third look."""

    def looked(looks):
        if rank == 1 and looks == 3 and comes:
            hidden.rename(path[1])

    with network(looked) as looks:
        try:
            state = {"a": torch.zeros(10)}
            dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path[rank]))
            return len(looks), state["a"].sum().item()
        except CheckpointException as error:
            return len(looks), str(error)


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


def load_nothing(rank, path, group=None):
    """Load what is nowhere; return how often this rank looked again."""
    name = f"all/{path}" if group is None else f"[0, 1]/all/{path}"
    key = f"{_missing_checkpoint._KEY}/{_missing_checkpoint._looks[name] + 1}/{name}"

    def looked(looks):
        until = time.monotonic() + (30 if looks == 1 else 0)
        while _private.group_count(key, 0) < 2 and time.monotonic() < until:
            time.sleep(0.001)  # the other rank has not looked yet

    reader = ringstow.dcp.StorageReader(path)
    with network(looked) as looks, pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(10)}, storage_reader=reader, process_group=group)
    return len(looks)


@on_ranks(2)
def test_ranks_do_not_wait_for_what_none_of_them_sees(rank, tmp_path):
    """Regression: they waited for 90 s for a checkpoint that never was."""
    for path in (tmp_path / "none", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert load_nothing(rank, str(path)) <= 1


@on_ranks(3)
def test_ranks_of_a_group_do_not_wait_for_what_none_of_them_sees(rank, tmp_path):
    group = dist.new_group([0, 1])
    if rank < 2:
        assert load_nothing(rank, str(tmp_path / "none"), group) <= 1


@on_ranks(2)
def test_rank_that_loads_alone_does_not_wait(rank, tmp_path):
    with network() as looks:
        if rank == 1:
            reader = ringstow.dcp.StorageReader(str(tmp_path / "none"))
            with pytest.raises(CheckpointException):
                dcp.load({"a": torch.zeros(10)}, storage_reader=reader, no_dist=True)
    assert looks == []


class Blind(ringstow.dcp.StorageReader):
    """Sees no checkpoint."""

    def _open(self, path):
        raise FileNotFoundError(2, "no such file or directory", path)


@on_ranks(2)
def test_ranks_agree_on_the_load_after_one_that_only_some_saw(rank, tmp_path):
    """Regression: a rank that saw nothing looked for both kinds, and counted one load more."""
    path = str(tmp_path / "step-1")
    if rank == 0:
        ringstow.save(STATE, path)
    dist.barrier()
    reader = (ringstow.dcp.StorageReader, Blind)[rank]
    with network() as looks, pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(10)}, storage_reader=reader(path))
    assert len(looks) == 90 * rank
    dist.barrier()
    if rank == 0:
        ringstow.remove(path)
    dist.barrier()
    assert load_nothing(rank, path) <= 1


@on_ranks(2)
def test_rank_that_has_given_up_is_no_longer_counted(rank, tmp_path):
    """Regression: the next rank then did not wait for what other ranks may see by now."""
    for turn in range(2):
        if turn == rank:
            with network() as looks, pytest.raises(FileNotFoundError):
                ringstow.dcp.StorageReader(str(tmp_path / "step-1")).read_metadata()
            assert len(looks) == 90
        dist.barrier()


def test_reader_alone_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "shared_file_system", lambda path: "nfs4")
    monkeypatch.setattr(_shared_fs_lag.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(FileNotFoundError):
        ringstow.dcp.StorageReader(tmp_path / "none").read_metadata()
