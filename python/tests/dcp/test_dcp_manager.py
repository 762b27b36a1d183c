"""A manager on several ranks: all of them save, keep, resume and fail together."""

from __future__ import annotations

import os
import pickle
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from converted import Evil
from layouts import HIDDEN, differences, filled, trained, whole
from ranks import on_ranks, raised
from support import flip, shards_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

import ringstow
import ringstow.dcp
from ringstow import CheckpointManager
from ringstow._manager import _after_save
from ringstow.distributed import PerRank, _save

LAYOUTS = ["plain", "fsdp2"]


def steps_in(root):
    """Return what is in a run's directory, but for the manager's own notes."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def state_of(layout, seed, step):
    model, optimizer = trained(layout, HIDDEN, seed)
    parts = get_state_dict(model, optimizer)
    return model, optimizer, {"model": parts[0], "optim": parts[1], "step": step}


def train(rank, root, layout, staging, options):
    """Save three steps in the background and one more; return the digest of the last."""
    with CheckpointManager(root, keep=2, **options) as manager:
        assert manager.restore(into={}) is None
        for step in (1, 2, 3):
            _, _, state = state_of(layout, step, step)
            metrics = {"loss": rank + step / 10}
            handle = manager.save_async(step, state, metrics=metrics, staging=staging)
            handle.wait_staged()
        report = handle.result()
        assert report.path == str(root / "step-00000003")
        model, optimizer, state = state_of(layout, 4, 4)
        manager.save(4, state, metrics={"loss": rank + 0.4})
        manager.wait()
        assert len(manager.retention_report.kept) == 2
        assert [found.step for found in manager.steps()] == [3, 4]
        assert manager.best("loss", "max").metrics == {"loss": 0.4}
    learned = whole(model, optimizer)
    return learned if rank == 0 else None


def resume(rank, root, layout, options):
    with CheckpointManager(root, **options) as manager:
        model, optimizer, state = state_of(layout, 9, 0)
        restored = manager.restore(into=state)
        assert (restored.step, restored.state is state, state["step"]) == (4, True, 4)
        assert restored.metrics == {"loss": 0.4}
        return filled(model, optimizer, state)


@pytest.mark.parametrize("staging", ["guard", "snapshot", "wait"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_save_keep_and_resume(ranks, tmp_path, layout, staging):
    saved = ranks(2).run(train, tmp_path, layout, staging, {})[0]
    assert differences(saved, ranks(2).run(resume, tmp_path, layout, {})[0]) == []
    assert steps_in(tmp_path) == ["step-00000003", "step-00000004"]


def test_striped_steps(ranks, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    options = {"config": ringstow.Config(stripe=disks)}
    root = tmp_path / "run"
    saved = ranks(2).run(train, root, "fsdp2", "guard", options)[0]
    assert differences(saved, ranks(2).run(resume, root, "fsdp2", options)[0]) == []
    assert [sorted(os.listdir(disk)) for disk in disks] == [["step-00000003", "step-00000004"]] * 2


@pytest.mark.parametrize("options", [{}, {"nodes": ringstow.Nodes()}])
@on_ranks(2)
def test_closing_a_manager_ends_the_groups_that_it_has_made(rank, tmp_path, options):
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with CheckpointManager(tmp_path / str(rank if options else 0), **options) as manager:
        manager.save_async(1, {"w": torch.ones(3)})
        manager.wait()
        assert len(groups) > before
    assert len(groups) == before


@on_ranks(2)
def test_a_group_of_some_ranks_saves_without_the_others(rank, tmp_path):
    group = dist.new_group([1], backend="gloo")
    if rank == 0:
        return
    with CheckpointManager(tmp_path, group=group) as manager:
        manager.save_async(5, {"w": torch.ones(3)})
        into = {"w": torch.zeros(3)}
        assert manager.restore(into=into).step == 5
        assert into["w"].eq(1).all()
    dist.destroy_process_group(group)  # the caller's: the manager has left it alone


def shard_of(rank, value):
    return {f"w{rank}": torch.full((100,), float(value))}


def calls_that_differ(rank, root):
    with CheckpointManager(root) as manager:
        said = [raised(lambda: manager.save(rank, shard_of(rank, 1)))]
        call = manager.latest if rank else manager.steps
        said.append(raised(call))
    return said


def test_ranks_that_differ_are_told_on_all_ranks(ranks, tmp_path):
    one, other = ranks(2).run(calls_that_differ, tmp_path)
    assert one == other
    assert "rank 0: save[0]; rank 1: save[1]" in one[0][1]
    assert "rank 0: steps[]; rank 1: latest[]" in one[1][1]
    assert os.listdir(tmp_path) == []


def fails_alone(rank, root, moment):
    """Fail on rank 1 alone; return each rank's errors, and what is saved afterwards."""
    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, shard_of(rank, 1))

        fail, stage = _save._native.start_write_dealt, _save._guard.stage
        if rank == 1 and moment == "write":
            fail = Mock(side_effect=OSError(28, "No space left on device"))
        elif rank == 1 and moment == "stage":
            stage = Mock(side_effect=MemoryError("no memory for the copies"))
        metrics = {"loss": "low"} if moment == "metrics" and rank == 1 else None
        with (
            patch.object(_save._native, "start_write_dealt", fail),
            patch.object(_save._guard, "stage", stage),
        ):
            errors = [
                raised(lambda: manager.save_async(2, shard_of(rank, 2), metrics)),
                raised(manager.wait),
                raised(manager.wait),
            ]
        assert manager.latest().step == 1
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        optimizer.step()  # waits for no save that has failed
        manager.save(3, shard_of(rank, 3))
        assert [found.step for found in manager.steps()] == [3]
    return errors


def test_a_background_save_that_fails_on_one_rank_fails_on_all_once(ranks, tmp_path):
    for at_call, at_wait, again in ranks(2).run(fails_alone, tmp_path, "write"):
        assert at_call is None
        assert at_wait[0] in ("OSError", "Error")
        assert "No space left" in at_wait[1]
        assert at_wait[1].count("keep + 1 steps: with keep=1 for 2") == 1
        assert again is None


@pytest.mark.parametrize(
    ("moment", "text"), [("stage", "no memory for the copies"), ("metrics", "not a number")]
)
def test_a_call_that_fails_on_one_rank_fails_on_all(ranks, tmp_path, moment, text):
    errors = ranks(2).run(fails_alone, tmp_path, moment)
    assert errors[1][0][0] in ("MemoryError", "InvalidStateError")
    assert "rank 1" in errors[0][0][1]
    for at_call, at_wait, again in errors:
        assert text in at_call[1]
        assert (at_wait, again) == (None, None)


def restores(rank, root, options, shape=100):
    into = {f"w{rank}": torch.zeros(shape)}
    with CheckpointManager(root) as manager:
        try:
            restored = manager.restore(into=into, **options)
        except BaseException as error:
            return type(error).__name__, str(error)
    return restored.step, into[f"w{rank}"][0].item()


def save_steps(rank, root):
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save_async(step, shard_of(rank, step))


def test_damage_of_one_ranks_shard_sends_all_to_the_previous_step(ranks, tmp_path):
    pool = ranks(2)
    pool.run(save_steps, tmp_path)
    damaged = shards_of(tmp_path / "step-00000003")[1]  # rank 1's
    flip(damaged, damaged.stat().st_size - 1)
    said = pool.run(restores, tmp_path, {})
    assert [kind for kind, _ in said] == ["Error", "CorruptCheckpointError"]
    assert all(damaged.name in text for _, text in said)
    assert pool.run(restores, tmp_path, {"on_corrupt": "previous"}) == [(2, 2.0)] * 2
    manifest = tmp_path / "step-00000002/manifest.json"
    flip(manifest, manifest.stat().st_size // 2)
    assert pool.run(restores, tmp_path, {"on_corrupt": "previous"}) == [(1, 1.0)] * 2
    assert pool.run(restores, tmp_path, {"step": 1}) == [(1, 1.0)] * 2
    for kind, text in pool.run(restores, tmp_path, {"step": 7}):
        assert kind == "NoCheckpointError"
        assert "its steps: 1, 2, 3" in text


def test_what_is_no_damage_is_raised_on_all_ranks(ranks, tmp_path):
    pool = ranks(2)
    pool.run(save_steps, tmp_path)
    for kind, text in pool.run(restores, tmp_path, {"on_corrupt": "previous"}, 7):
        assert kind == "KeyMismatchError"
        assert "w0 is" in text or "w1 is" in text
    shards_of(tmp_path / "step-00000003")[0].unlink()
    for kind, _ in pool.run(restores, tmp_path, {"on_corrupt": "previous"}):
        assert kind == "MissingFilesError"


@on_ranks(2)
def test_ranks_need_a_state_to_restore_into(rank, tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ringstow.InvalidStateError, match="which says which shards"),
    ):
        manager.restore()


@on_ranks(2)
def test_retention_that_fails_is_tried_again(rank, tmp_path):
    fail = Mock(return_value=(None, PermissionError(13, "Permission denied"), []))
    with CheckpointManager(tmp_path, keep=1) as manager:
        with patch.object(_after_save, "cleared", fail):
            for step in (1, 2):
                manager.save_async(step, shard_of(rank, step))
            manager.wait()
        assert manager.retention_report is None
        assert (manager.retention_error is not None) == (rank == 0)
        assert [found.step for found in manager.steps()] == [1, 2]
        manager.save_async(3, shard_of(rank, 3))
        manager.wait()
        assert len(manager.retention_report.removed) == 2


def block_raises(rank, root):
    def block():
        with CheckpointManager(root) as manager:
            manager.save_async(1, shard_of(rank, 1))
            if rank == 1:
                raise ZeroDivisionError("rank 1 alone")
            manager.save_async(2, shard_of(rank, 2))

    return raised(block)


def test_a_block_that_raises_on_one_rank_ends_there_and_fails_the_others(ranks, tmp_path):
    one, other = ranks(2).run(block_raises, tmp_path)
    assert other == ("ZeroDivisionError", "rank 1 alone")
    assert one is not None  # not an endless wait
    assert [found.step for found in ringstow.steps(tmp_path)] == [1]
    ranks(2).stop()


@on_ranks(2)
def test_unguarded_saves_are_refused(rank, tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(ringstow.InvalidStateError):
        manager.save_async(1, {"w": torch.ones(3)}, staging="unguarded")


def save_by(rank, root, layout, writer=None):
    """Save a step by torch's own writer or another."""
    model, optimizer, state = state_of(layout, 4, 4)
    dcp.save(state, checkpoint_id=root / "step-4", storage_writer=writer and writer())
    return whole(model, optimizer)


@pytest.mark.parametrize("writer", [None, ringstow.dcp.StorageWriter], ids=["torch", "ringstow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_resume_from_what_a_dcp_writer_left(ranks, tmp_path, layout, writer):
    saved = ranks(2).run(save_by, tmp_path, layout, writer)[0]
    assert differences(saved, ranks(2).run(first_start, tmp_path, layout)[0]) == []
    assert steps_in(tmp_path) == ["step-00000005", "step-4"]


def first_start(rank, root, layout):
    with CheckpointManager(root) as manager:
        model, optimizer, state = state_of(layout, 9, 0)
        restored = manager.restore(into=state)
        assert (restored.step, restored.path, state["step"]) == (4, str(root / "step-4"), 4)
        end = filled(model, optimizer, state)
        manager.save(5, state)
        assert manager.restore(into=state).step == 5
        return end


def refused_start(rank, root, words):
    with CheckpointManager(root) as manager:
        _, _, state = state_of("plain", 9, 0)
        with pytest.raises((ringstow.Error, CheckpointException)) as caught:
            manager.restore(into=state)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ranks_are_told_what_to_do_with_a_file(ranks, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "checkpoint-3.pt")
    ranks(2).run(refused_start, tmp_path, ["checkpoint-3.pt", "(torch)", "ringstow.load(path)"])


def test_ranks_unpickle_nothing_hostile_that_torchs_writer_left(ranks, tmp_path):
    ranks(2).run(save_by, tmp_path, "plain")
    metadata = pickle.loads((tmp_path / "step-4" / ".metadata").read_bytes())
    metadata.storage_meta = Evil(tmp_path / "mark")
    (tmp_path / "step-4" / ".metadata").write_bytes(pickle.dumps(metadata))
    ranks(2).run(refused_start, tmp_path, ["mkdir"])
    assert not (tmp_path / "mark").exists()


def save_evil(rank, root):
    _, _, state = state_of("plain", 4, 4)
    dcp.save({**state, "step": Evil(root / "mark")}, checkpoint_id=root / "step-4")


def test_ranks_unpickle_no_hostile_value_that_torchs_writer_left(ranks, tmp_path):
    ranks(2).run(save_evil, tmp_path)
    ranks(2).run(refused_start, tmp_path, ["step", "allow_pickle"])
    assert not (tmp_path / "mark").exists()


class Counter:
    """An object with a state dict, as torchtitan and DCP's own programs have them."""

    def __init__(self, rank, value):
        self.key, self.value = f"of{rank}", value

    def state_dict(self):
        return {self.key: torch.full((3,), float(self.value)), "count": self.value}

    def load_state_dict(self, state):
        self.value = int(state[self.key][0])
        assert state["count"] == self.value


@on_ranks(2)
def test_objects_with_a_state_dict_and_values_of_each_rank_come_back(rank, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"object": Counter(rank, 5), "rng": PerRank(rank)})
        into = {"object": Counter(rank, 0), "rng": PerRank(None)}
        manager.restore(into=into)
    assert (into["object"].value, into["rng"].value) == (5, rank)


class Fails:
    def state_dict(self):
        raise ZeroDivisionError("no state here")

    def load_state_dict(self, state):
        pass


@on_ranks(2)
def test_an_object_without_its_state_on_one_rank_fails_all(rank, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"object": Counter(rank, 5)})
        state = {"object": Fails() if rank == 1 else Counter(rank, 0)}
        for call in (
            lambda: manager.save(2, state),
            lambda: manager.save_async(2, state),
            lambda: manager.restore(into=state),
        ):
            assert "no state here" in raised(call)[1]
    dist.barrier()
    assert steps_in(tmp_path) == ["step-00000001"]
