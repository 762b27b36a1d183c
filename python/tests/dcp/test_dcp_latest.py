"""The newest checkpoint of a run: rank 0 looks it up, and all ranks get the same answer."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised

import ringstow
import ringstow.dcp
from ringstow._ranks import _shared_fs_lag, _team

STATE = {"a": torch.arange(10.0)}


def save_steps(root, *steps):
    for step in steps:
        ringstow.save(STATE, root / f"step-{step}", step=step)


def newest(rank, roots, **options):
    return ringstow.dcp.latest(roots[rank], **options).path


def test_all_ranks_get_what_rank_0_sees(ranks, tmp_path):
    roots = [tmp_path / "as rank 0 sees it", tmp_path / "as rank 1 sees it"]
    save_steps(roots[0], 1, 2)
    save_steps(roots[1], 1)  # a stale directory listing
    expected = str(roots[0] / "step-2")
    assert ranks(2).run(newest, roots) == [expected, expected]
    assert {ringstow.latest(root).path for root in roots} == {expected, str(roots[1] / "step-1")}


@on_ranks(2)
def test_arguments_and_a_run_without_checkpoints(rank, tmp_path):
    if rank == 0:
        save_steps(tmp_path, 1, 2)
    assert ringstow.dcp.latest(tmp_path, before=2).path == str(tmp_path / "step-1")
    assert ringstow.dcp.latest(tmp_path / "nothing") is None


def newest_seen_late(rank, root, looks):
    """Rank 1 sees the checkpoint only at attempt `looks`; None means never."""
    seen = 0

    def late(path):
        nonlocal seen
        seen += 1
        return rank != 1 or (looks is not None and seen >= looks)

    before = _team.sees, _shared_fs_lag.SEEN_S, _shared_fs_lag.POLL_S
    _team.sees, _shared_fs_lag.POLL_S = late, 0.0
    if looks is None:
        _shared_fs_lag.SEEN_S = 0.0
    try:
        return ringstow.dcp.latest(root).path, seen
    except ringstow.NoCheckpointError as error:
        return str(error), seen
    finally:
        _team.sees, _shared_fs_lag.SEEN_S, _shared_fs_lag.POLL_S = before


def test_rank_waits_until_it_sees_the_checkpoint(ranks, tmp_path):
    save_steps(tmp_path, 1)
    path = str(tmp_path / "step-1")
    assert ranks(2).run(newest_seen_late, tmp_path, 3) == [(path, 1), (path, 3)]


def test_all_ranks_raise_if_one_never_sees_the_checkpoint(ranks, tmp_path):
    save_steps(tmp_path, 1)
    for said, _ in ranks(2).run(newest_seen_late, tmp_path, None):
        assert "rank(s) 1 did not see it" in said
        assert str(tmp_path / "step-1") in said


@on_ranks(2)
def test_error_on_rank_0_is_raised_on_every_rank(rank, tmp_path):
    if rank == 0:
        save_steps(tmp_path, 1)
        for shard in (tmp_path / "step-1").glob("*.safetensors"):
            shard.unlink()
    assert raised(lambda: ringstow.dcp.latest(tmp_path))[0] == "MissingFilesError"


def test_rank_checkpoints_are_seen(tmp_path):
    (tmp_path / "step-1/rank00000").mkdir(parents=True)
    assert _team.sees(str(tmp_path / "step-1"))
    assert not _team.sees(str(tmp_path / "step-2"))
    os.mkdir(tmp_path / "step-3")
    assert not _team.sees(str(tmp_path / "step-3"))


def test_files_of_a_save_in_progress_are_no_checkpoint(tmp_path):
    (tmp_path / "rank00000-0.safetensors.part").write_bytes(b"")
    assert not _team.sees(str(tmp_path))


def test_without_process_group_calls_ringstow_latest(tmp_path):
    assert not dist.is_initialized()
    assert ringstow.dcp.latest(tmp_path) is None
    save_steps(tmp_path, 7)
    assert ringstow.dcp.latest(tmp_path).path == str(tmp_path / "step-7")
    with pytest.raises(ringstow.InvalidStateError):
        ringstow.dcp.latest(tmp_path, pattern="nothing")
