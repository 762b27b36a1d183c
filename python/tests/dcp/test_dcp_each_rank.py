"""Rank checkpoints: a step is complete if it has those of all ranks."""

from __future__ import annotations

import json
import shutil
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support import assert_same, logged
from test_dcp_killed import die_at
from torch.distributed.checkpoint.api import CheckpointException
from torch_has import needs_use_collectives

import ringstow
from ringstow import _native
from ringstow.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam

pytestmark = needs_use_collectives


def state_of(rank, step):
    return {"own": torch.full((1000,), rank + 10.0 * step), "step": step}


def save(rank, path, step, victims=(), died=None):
    """Save a rank checkpoint; the victims skip it, or die while they write."""
    if rank in victims:
        if died is None:
            dist.barrier()  # the barrier that torch runs after a save
            return
        die_at(died)
    state = state_of(rank, step)
    dcp.save(state, checkpoint_id=path, storage_writer=StorageWriter(), use_collectives=False)


def resume(rank, root):
    """Load the newest step; return its number."""
    path = ringstow.latest(root)
    state = {"own": torch.zeros(1000), "step": -1}
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())
    assert_same(state, state_of(rank, state["step"]))
    return state["step"]


def problem(path):
    (found,) = ringstow.steps(path)
    assert found.status == "incomplete"
    assert ringstow.latest(path) is None
    return found.problem


def manifest(path, rank):
    return json.loads((path / f"rank{rank:05}" / "manifest.json").read_text())


def test_latest_is_a_step_that_all_ranks_saved(ranks, tmp_path, capfd):
    for step in (1, 2):
        ranks(2).run(save, tmp_path / f"step-{step}", step)
    ranks(2).run(save, tmp_path / "step-3", 3, (1,))
    assert _native.cli(["ringstow", "ls", str(tmp_path), "--json"]) == 0
    listed = [one["status"] for one in json.loads(capfd.readouterr().out)]
    assert listed == ["committed", "committed", "incomplete"]
    assert ringstow.latest(tmp_path).path == str(tmp_path / "step-2")
    assert ranks(2).run(resume, tmp_path) == [2, 2]
    assert "of rank 1" in problem(tmp_path / "step-3")
    parts = [manifest(tmp_path / "step-2", rank)["part_of"] for rank in range(2)]
    assert [(part["rank"], part["ranks"]) for part in parts] == [(0, 2), (1, 2)]
    assert parts[0]["save"] == parts[1]["save"]


@pytest.mark.parametrize("died", ["while writing", "before the commit"])
def test_latest_skips_a_step_in_which_a_rank_died(ranks, tmp_path, died):
    ranks(2).run(save, tmp_path / "step-1", 1)
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        ranks(2).run(save, tmp_path / "step-2", 2, (1,), died)
    assert ringstow.latest(tmp_path).path == str(tmp_path / "step-1")
    assert ranks(2).run(resume, tmp_path) == [1, 1]
    ranks(2).run(save, tmp_path / "step-2", 2)
    assert ranks(2).run(resume, tmp_path) == [2, 2]


def test_step_that_some_ranks_saved_again_does_not_count(ranks, tmp_path):
    path = tmp_path / "last"
    ranks(2).run(save, path, 1)
    ranks(2).stop()  # the job restarts
    ranks(2).run(save, path, 2, (1,))
    assert "different saves" in problem(path)
    ranks(2).run(save, path, 3)
    # Each rank counts its own saves, so the absent one is behind.
    assert "different saves" in problem(path)
    ranks(2).stop()
    for step in (4, 5):
        ranks(2).run(save, path, step)
        assert ranks(2).run(resume, tmp_path) == [step, step]


def test_one_process_cannot_load_the_step(ranks, tmp_path):
    ranks(2).run(save, tmp_path / "step-1", 1)
    with pytest.raises(ringstow.IncompleteCheckpointError, match="step-1/rank00000") as caught:
        ringstow.load(tmp_path / "step-1")
    assert "dcp.load" in str(caught.value)
    loaded = ringstow.load(tmp_path / "step-1" / "rank00001", allow_pickle=True)
    assert_same(loaded, state_of(1, 1))


@on_ranks(3)
def test_unknown_process_group_is_not_recorded(rank, tmp_path):
    group = dist.new_group([1, 2], backend="gloo")
    if rank:
        options = {"process_group": group, "use_collectives": False}
        dcp.save(state_of(rank, 1), storage_writer=StorageWriter(tmp_path), **options)
    dist.barrier()
    assert [("part_of" in manifest(tmp_path, rank)) for rank in range(2)] == [False, False]
    assert "not known" in problem(tmp_path)


def test_rank_count_is_unknown_without_a_process_group(tmp_path):
    save(0, tmp_path, 1)
    assert "part_of" not in manifest(tmp_path, 0)
    text = problem(tmp_path)
    assert "not known" in text
    assert "process group" in text


@on_ranks(2)
def test_unresponsive_store_does_not_fail_a_save(rank, tmp_path):
    without = patch.object(dist.distributed_c10d, "_get_default_store", lambda: None)
    with without, logged() as said:
        save(rank, tmp_path, 1)
    assert any("store does not answer" in text for text in said)
    assert "not known" in problem(tmp_path)


def load(path):
    state = {"own": torch.zeros(1000), "step": -1}
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())
    return state


def refusals(rank, path):
    """Load an explicit path; return the error of each rank."""
    with pytest.raises(CheckpointException) as caught:
        load(path)
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def test_shares_of_different_saves_are_refused_on_all_ranks(ranks, tmp_path):
    ranks(2).run(save, tmp_path, 1)
    ranks(2).run(save, tmp_path, 2, (0,))  # rank 1's part now belongs to a later save
    for by_rank in ranks(2).run(refusals, tmp_path):
        assert list(by_rank) == [1]
        said = f"{tmp_path} is not a complete checkpoint: its shares must be of one save, but"
        assert said in by_rank[1]
        for rank in range(2):
            said = manifest(tmp_path, rank)["part_of"]["save"]
            assert said.endswith(f"-{1 + rank}")
            assert f"of save {said} by 2 ranks" in by_rank[1]
        assert "Resume from an earlier checkpoint" in by_rank[1]


@pytest.mark.parametrize("left", ["nothing", "an uncommitted part", "a link"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_path_that_lacks_a_part_is_refused_on_all_ranks(ranks, tmp_path, left, victim):
    path = tmp_path / "step-1"
    ranks(2).run(save, path, 1)
    own = path / f"rank0000{victim}" / "manifest.json"
    if left == "nothing":
        shutil.rmtree(own.parent)
    else:
        own.rename(own.with_suffix(".away"))
    if left == "a link":
        own.symlink_to(own.with_suffix(".away"))
    by_rank, same = ranks(2).run(refusals, path)
    assert by_rank == same
    said = f"2 ranks saved it, each by itself, and the committed share of rank {victim} is missing"
    assert victim in by_rank
    assert said in by_rank[1 - victim]


def test_a_renamed_part_is_not_loaded_by_another_rank(ranks, tmp_path):
    ranks(2).run(save, tmp_path, 1)
    shutil.rmtree(tmp_path / "rank00001")
    shutil.copytree(tmp_path / "rank00000", tmp_path / "rank00001")
    for by_rank in ranks(2).run(refusals, tmp_path):
        assert "rank00001 holds the share of rank 0: was it renamed?" in by_rank[1]


def test_reader_error_names_the_missing_part(ranks, tmp_path):
    ranks(2).run(save, tmp_path, 1)
    with pytest.raises(ringstow.IncompleteCheckpointError, match="load it on 2 ranks, not on more"):
        StorageReader(tmp_path).read_metadata(rank=2)
    (tmp_path / "rank00001" / "manifest.json").unlink()
    with pytest.raises(ringstow.IncompleteCheckpointError, match="of rank 1 is missing") as caught:
        StorageReader(tmp_path).read_metadata(rank=1)
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    ("ranks_of", "said"),
    [(3, r"ranks 1, 2 is missing \(rank00001\)"), (1 << 24, "19, 20 and more")],
)
def test_all_missing_parts_are_named_up_to_a_limit(tmp_path, ranks_of, said):
    part = {"part_of": {"rank": 0, "ranks": ranks_of, "save": "a"}}
    (tmp_path / "rank00000").mkdir()
    (tmp_path / "rank00000" / "manifest.json").write_text(json.dumps(part))
    with pytest.raises(ringstow.IncompleteCheckpointError, match=said):
        _native.check_own_share(str(tmp_path), 0)


def test_shares_without_a_save_still_load(tmp_path):
    save(0, tmp_path, 1)
    assert_same(load(tmp_path), state_of(0, 1))


def test_one_part_is_loaded_from_its_own_directory(ranks, tmp_path):
    ranks(2).run(save, tmp_path, 1)
    shutil.rmtree(tmp_path / "rank00000")
    assert_same(load(tmp_path / "rank00001"), state_of(1, 1))
