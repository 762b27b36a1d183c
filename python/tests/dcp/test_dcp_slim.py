"""A part that every rank saved apart can be dropped from the checkpoint of all ranks."""

from __future__ import annotations

import inspect
import os
import pickle
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import HIDDEN, differences, trained, whole
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_has import needs_use_collectives

import ringstow
from ringstow import CheckpointManager
from ringstow._manager import _after_save
from ringstow.dcp import LoadPlanner, StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

APART = ["optim"]


def state_of(layout, seed):
    model, optimizer = trained(layout, HIDDEN, seed)
    parts = get_state_dict(model, optimizer)
    return model, optimizer, {"model": parts[0], "optim": parts[1], "step": seed}


def save(rank, path, layout, apart):
    model, optimizer, state = state_of(layout, 1)
    dcp.save(state, checkpoint_id=path, storage_writer=StorageWriter(droppable=apart))
    return whole(model, optimizer)


def load_model(rank, path, layout):
    """Load the model alone into another one; the optimizer's state stays as it is."""
    model, optimizer, state = state_of(layout, 2)
    del state["optim"]
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())
    optim = get_state_dict(model, optimizer)[1]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optim)
    assert state["step"] == 1
    return whole(model, optimizer)


def files_of(rank, removed):
    return [path for path in removed if os.path.basename(path).startswith(f"rank{rank:05}")]


@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_files_of_all_ranks_go_and_the_model_loads_on_any_number(ranks, tmp_path, layout):
    path = tmp_path / "step-1"
    saved = ranks(2).run(save, path, layout, APART)[0]
    done = ringstow.slim(path, drop=APART)
    assert done.tensors > 0
    assert done.left == ()
    assert files_of(0, done.removed)
    assert files_of(1, done.removed) or layout == "plain"
    assert ringstow.verify(path).ok
    assert sorted(ringstow.load(path)) == ["model", "step"]
    for world_size in (1, 2):
        loaded = ranks(world_size).run(load_model, path, layout)[0]
        assert differences(saved[0], loaded[0]) == []


def test_dotted_prefix_is_dropped_alone(ranks, tmp_path):
    path = tmp_path / "step-1"
    ranks(2).run(save, path, "fsdp2", ["optim.state"])
    assert ringstow.slim(path, drop=["optim.state"]).tensors > 0
    assert list(ringstow.load(path)["optim"]) == ["param_groups"]


def raised(call):
    try:
        call()
    except CheckpointException as error:
        return str(error), [str(one) for one, _ in error.failures.values()]
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    return None


def load_all(rank, path, planner):
    state = {"model": {f"w{rank}": torch.zeros(9)}, "optim": {f"m{rank}": torch.zeros(9)}}
    return raised(
        lambda: dcp.load(state, checkpoint_id=path, storage_reader=StorageReader(), planner=planner)
    )


def save_small(rank, path, apart, at=None):
    state = {"model": {f"w{rank}": torch.ones(9)}, "optim": {f"m{rank}": torch.ones(9)}}
    parts = apart if at in (None, rank) else []
    writer = StorageWriter(droppable=parts)
    return raised(lambda: dcp.save(state, checkpoint_id=path, storage_writer=writer))


def test_loads_say_that_the_part_was_dropped(ranks, tmp_path, caplog):
    path = tmp_path / "step-1"
    assert ranks(2).run(save_small, path, APART) == [None, None]
    ringstow.slim(path, drop=APART)
    said = ranks(2).run(load_all, path, LoadPlanner())
    assert all("`slim` has dropped optim from this checkpoint" in str(one) for one in said)
    # torch's own planner names a key; the log says why it is missing
    state = {"model": {"w0": torch.zeros(9)}, "optim": {"m0": torch.zeros(9)}}
    text, failures = raised(
        lambda: dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())
    )
    assert "Missing key in checkpoint state_dict: optim.m0" in text + str(failures)
    assert f"{path}: `slim` has dropped optim from this checkpoint" in caplog.text
    # what stock DCP unpickles names ringstow, before and after
    with pytest.raises(ringstow.UnsupportedError, match="ringstow checkpoint"):
        pickle.loads((path / ".metadata").read_bytes())


def test_parts_that_no_rank_has_fail_on_all_before_anything_is_written(ranks, tmp_path):
    path = tmp_path / "step-1"
    said = ranks(2).run(save_small, path, ["optimizer"])
    assert all("nothing named 'optimizer'" in str(one) for one in said)
    assert not path.exists()


def test_ranks_that_set_other_parts_apart_fail_on_all(ranks, tmp_path):
    path = tmp_path / "step-1"
    said = ranks(2).run(save_small, path, APART, 1)
    assert all('rank 0 set [] apart, rank 1 ["optim"]' in str(one) for one in said)
    assert ringstow.latest(tmp_path) is None


@needs_use_collectives
@on_ranks(2)
def test_ranks_that_save_each_by_itself_are_refused(rank, tmp_path):
    writer, path = StorageWriter(droppable=APART), tmp_path / "step-1"
    options = {"checkpoint_id": path, "storage_writer": writer, "use_collectives": False}
    said = raised(lambda: dcp.save({"optim": {f"m{rank}": torch.ones(9)}}, **options))
    assert "use_collectives=False" in str(said)
    dist.barrier()
    assert not path.exists()


@pytest.mark.parametrize(
    ("apart", "error"), [("optim", TypeError), ([1], TypeError), (["optim."], ringstow.Error)]
)
def test_wrong_names_are_refused_when_the_writer_is_made(apart, error):
    with pytest.raises(error):
        StorageWriter(droppable=apart)


def test_pickled_writer_sets_the_same_parts_apart(tmp_path):
    writer = pickle.loads(pickle.dumps(StorageWriter(droppable=APART)))
    state = {"model": {"w": torch.ones(9)}, "optim": {"m": torch.ones(9)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", storage_writer=writer)
    assert ringstow.slim(tmp_path / "a", drop=APART).tensors == 1


def test_names_that_a_writer_is_given_later_count_for_the_saves_after_it(tmp_path):
    writer, state = StorageWriter(), {"model": {"w": torch.ones(9)}, "optim": {"m": torch.ones(9)}}
    dcp.save(state, checkpoint_id=tmp_path / "before", storage_writer=writer, no_dist=True)
    writer.set_droppable(APART)
    dcp.save(state, checkpoint_id=tmp_path / "after", storage_writer=writer, no_dist=True)
    with pytest.raises(ringstow.InvalidStateError):
        ringstow.slim(tmp_path / "before", drop=APART)
    assert ringstow.slim(tmp_path / "after", drop=APART).tensors == 1


@pytest.mark.skipif(
    "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters,
    reason="this torch keeps no plans",
)
@on_ranks(2)
def test_plans_that_torch_keeps_set_the_part_apart_too(rank, tmp_path):
    writer = StorageWriter(droppable=APART)
    for step in (1, 2, 3):
        path = tmp_path / str(step)
        state = {"model": {f"w{rank}": torch.ones(9)}, "optim": {f"m{rank}": torch.ones(9)}}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
        if rank == 0:
            assert ringstow.slim(path, drop=APART).tensors == 2


# The manager.


def train(rank, root, steps, keep):
    with CheckpointManager(root, keep=keep) as manager:
        for step in steps:
            manager.save_async(step, state_of("fsdp2", step)[2])
        manager.wait()
        return manager.retention_error


def whole_steps(root):
    return [step.step for step in ringstow.steps(root) if not step.dropped]


def restore(rank, root, step):
    with CheckpointManager(root) as manager:
        _, _, state = state_of("fsdp2", 9)
        del state["optim"]
        restored = manager.restore(step, into=state)
        return restored.step, restored.dropped, restored.state["step"]


def test_older_steps_of_ranks_lose_the_optimizer_and_restore_the_model(ranks, tmp_path):
    keep = ringstow.Retention(last=3, slim_after=2, drop=APART)
    said = ranks(2).run(train, tmp_path, [1, 2, 3, 4], keep)
    assert said == [None, None]
    assert [step.step for step in ringstow.steps(tmp_path)] == [2, 3, 4]
    assert whole_steps(tmp_path) == [3, 4]
    assert ranks(2).run(restore, tmp_path, 2) == [(2, ("optim",), 2)] * 2


@on_ranks(2)
def test_state_without_the_part_fails_on_all_ranks(rank, tmp_path):
    with CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        said = raised(lambda: manager.save(1, state_of("fsdp2", 1)[2]))
        assert manager.latest() is None
    assert "anything named 'optimizer'" in str(said)


@on_ranks(2)
def test_slimming_that_fails_fails_no_save_and_is_tried_again(rank, tmp_path):
    refusing = Mock(return_value=(None, OSError("refused"), []))
    keep = ringstow.Retention(slim_after=1, drop=APART)
    with CheckpointManager(tmp_path, keep=keep) as manager:
        with patch.object(_after_save, "cleared", refusing):
            for step in (1, 2):
                manager.save(step, state_of("fsdp2", step)[2])
        assert str(manager.retention_error) == ("None" if rank else "refused")
        manager.save(3, state_of("fsdp2", 3)[2])
        assert manager.retention_error is None
    assert whole_steps(tmp_path) == [3]
