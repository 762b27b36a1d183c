"""Two gloo ranks with Accelerate, by DDP and by FSDP2: saves, loads, failures of one rank."""

from __future__ import annotations

import errno
import os
import resource
import sys
from unittest.mock import Mock

import accelerate_runs as runs
import children
import pytest
import torch
from accelerate_runs import EVERY
from all_trainers import assert_slims
from children import on_ranks, results
from support import assert_same, logged, python
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations.accelerate import RingstowAccelerator

pytestmark = pytest.mark.timeout(300)
children.preload(__name__)

RANKS = 2
BOTH = pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp2"])


def newest(root):
    return os.path.join(root, "checkpoints", runs.checkpoints(root)[-1])


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """Return the directories of finished runs by kind, and how their ranks ended."""
    at = tmp_path_factory.mktemp("runs")
    return {
        kind: (at / kind, results(RANKS, runs.ours, at / kind, options))
        for kind, options in (("ddp", {}), ("fsdp2", {"fsdp": True}))
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {}),
        ("fsdp2", {"fsdp": True}),
        ("fsdp2", {"fsdp": True, "plugin": {"state_dict_type": "FULL_STATE_DICT"}}),
    ],
    ids=["ddp", "fsdp2", "fsdp2-whole-files"],
)
def test_ranks_resume_from_what_the_stock_accelerator_left(kind, options, runs_of, tmp_path):
    first = {**options, "steps": 2 * EVERY}
    results(RANKS, runs.stock, tmp_path, first)
    options.pop("plugin", None)
    ends = results(RANKS, runs.ours, tmp_path, options)
    assert_same(ends, runs_of[kind][1])  # those of a run that was never broken
    assert ringstow.verify(newest(tmp_path)).ok


def test_the_weights_of_ranks_load_in_one_process(runs_of):
    for root, ends in runs_of.values():
        saved = ringstow.load(newest(root), prefix="model")["model"]
        assert_same(dict(saved), ends[0]["model"])


def loaded(rank, ranks, path, options):
    """Load a checkpoint; return what is there then, and what was logged, or the error."""
    training = runs.Training(runs.accelerator(os.path.dirname(path), **options))
    before = torch.random.get_rng_state()
    with logged() as said:
        try:
            training.accelerator.load_state(path)
        except (ringstow.Error, CheckpointException) as error:  # DCP's is no Exception
            return str(error)
    is_kept = torch.random.get_rng_state().equal(before)
    return {**training.end(), "logged": said, "is_kept": is_kept}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_loads_on_other_numbers_of_ranks(kind, ranks, runs_of):
    root, ends = runs_of[kind]
    options = {"fsdp": kind == "fsdp2"}
    for rank, found in enumerate(results(ranks, loaded, newest(root), options)):
        for name in ("model", "moments"):
            assert_same(found[name], ends[0][name])
        assert found["is_kept"] == (rank >= RANKS)
        if rank < RANKS:
            assert_same(found["random"], ends[rank]["random"])
        expected = {2: "rank 2 keeps the random numbers"}.get(rank, "ranks 1 to 1 are left out")
        assert any(expected in line for line in found["logged"]) == (ranks == 1 or rank == 2)


def test_slim_drops_the_optimizer_of_all_ranks(runs_of, tmp_path):
    path = tmp_path / "checkpoints" / "checkpoint_0"
    assert_slims(newest(runs_of["fsdp2"][0]), path, "optimizer")
    assert "slim" in results(RANKS, loaded, path, {"fsdp": True})[0]


def test_kinds_do_not_mix(runs_of):
    for said in results(RANKS, loaded, newest(runs_of["ddp"][0]), {"fsdp": True}):
        assert "saved by one process or DDP, and this is FSDP2" in said


def failing(rank, ranks, root, victim, options):
    """Fail in one rank, then go on; all ranks raise it."""
    one = runs.accelerator(root, **options)
    training = runs.Training(one)
    training.step(torch.randn(2, runs.WIDTH))
    one.save_state()
    one.wait_for_checkpoint()
    if rank == victim:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    one.save_state()
    caught = []
    try:
        one.wait_for_checkpoint()
    except BaseException as error:
        caught.append(str(error) + str(getattr(error, "failures", "")))
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    hook = one.register_save_state_pre_hook(lambda *_: 1 / (rank - 1))  # fails on rank 1
    try:
        one.save_state()
    except (ZeroDivisionError, ringstow.Error) as error:
        caught.append(str(error))
    hook.remove()
    is_left = rank == 0 and any(name.startswith(".") for name in runs.checkpoints(root))
    one.save_state()
    one.wait_for_checkpoint()
    assert len(caught) == 2
    assert "File too large" in caught[0]
    assert "division" in caught[1]
    assert not is_left


@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("fsdp2", 0), ("fsdp2", 1)])
def test_a_failure_of_one_rank_raises_on_all_and_the_next_save_works(kind, victim, tmp_path):
    options = {"fsdp": kind == "fsdp2"}
    results(RANKS, failing, tmp_path, victim, options)
    # A failed save has used its number; the one of the hook has not.
    assert runs.checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_2"]
    for name in runs.checkpoints(tmp_path):
        assert ringstow.verify(tmp_path / "checkpoints" / name).ok


def refused(rank, ranks, root, options):
    """Save what only a pickle can keep: that is refused at the call."""
    training = runs.Training(runs.accelerator(root, **options))
    training.accelerator.register_for_checkpointing(runs.Odd())
    with pytest.raises(ringstow.Error, match="odd") as caught:
        training.accelerator.save_state()
    notes = getattr(caught.value, "__notes__", [""])
    assert "allow_pickle=True" in notes[-1] if rank == 0 else "rank 0 failed" in str(caught.value)


@BOTH
def test_a_value_that_cannot_be_saved_is_refused_on_all_ranks_at_the_call(options, tmp_path):
    results(RANKS, refused, tmp_path, options)
    assert runs.checkpoints(tmp_path) == []


@BOTH
@on_ranks(RANKS)
def test_an_object_of_one_rank_alone_is_refused_on_all_ranks_by_load_state(rank, options, tmp_path):
    """Register an object on rank 0 alone: the load is refused on all."""
    one = runs.Training(runs.accelerator(tmp_path, **options)).accelerator
    if rank == 0:
        one.register_for_checkpointing(runs.Progress())
    one.save_state()
    one.wait_for_checkpoint()
    with pytest.raises(ringstow.Error, match="2 registered objects, and 1 are here"):
        one.load_state()


@on_ranks(RANKS)
def test_large_tensors_of_objects_are_saved_by_fsdp2_as_they_were_at_the_call(tmp_path):
    """Change a large tensor of a registered object right after the call."""
    options = {"fsdp": True}
    large = runs.Average()
    one = runs.Training(runs.accelerator(tmp_path, **options)).accelerator
    one.register_for_checkpointing(large)
    one.save_state()
    large.average.add_(1)
    one.load_state()
    assert not large.average.any()


def leaving(rank, ranks, root, options):
    """Exit with a save in flight."""
    runs.Training(runs.accelerator(root, **options)).accelerator.save_state()


@BOTH
def test_a_process_that_exits_completes_its_save(options, tmp_path):
    assert children.exit_codes(RANKS, leaving, tmp_path, options) == [0] * RANKS
    assert runs.checkpoints(tmp_path) == ["checkpoint_0"]
    # No step was made: the optimizer has no state, and torch would make one up.
    assert "optimizer" not in ringstow.load(newest(tmp_path)) or not options


@BOTH
@on_ranks(1)
def test_an_optimizer_before_its_first_step_comes_back_without_a_state(options, tmp_path):
    """Load a checkpoint from before the first step into a trained optimizer."""
    training = runs.Training(runs.accelerator(tmp_path, **options))
    training.accelerator.save_state()
    training.step(torch.ones(2, runs.WIDTH))
    training.accelerator.load_state()
    assert not training.optimizer.optimizer.state_dict()["state"]
    assert training.optimizer.param_groups[0]["params"]


def exits_with_a_failure(root):
    """Exit with a save in flight that fails; not called in this process."""

    _rename_when_complete.sync = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    one = RingstowAccelerator(cpu=True)
    one.prepare(torch.nn.Linear(2, 2))
    one.save_state(os.path.join(root, "state"))


def test_a_process_exits_with_1_if_its_last_save_fails(tmp_path):
    code = "import sys, test_accelerate_ranks as t; t.exits_with_a_failure(sys.argv[1])"
    path = os.pathsep.join(filter(None, sys.path))
    done = python(code, tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert not os.listdir(tmp_path)
