"""After SIGTERM to one rank or to all, an Accelerator's ranks save one last step, and resume it."""

from __future__ import annotations

import os
import signal

import accelerate_runs as runs
import children
import pytest
from support import assert_same

import ringstow

pytestmark = pytest.mark.timeout(600)
children.preload(__name__)

EPOCHS = 30
STEPS = EPOCHS * runs.BATCHES  # ranks with steps of milliseconds hear of a signal within 64 of them
WHEN = ringstow.AtSteps([2]) | ringstow.OnSignal(signal.SIGTERM)


def stopped(rank, ranks, root, signalled, options):
    """Train as a rank that may get SIGTERM within its fifth step; return how it ended."""
    one = runs.accelerator(root, when=WHEN, **options)
    training = runs.Training(one)
    progress = training.progress
    if one.latest_checkpoint() is not None:
        one.load_state()
    step = progress.epoch * runs.BATCHES + progress.batch
    while progress.epoch < EPOCHS and not one.stopping:
        training.loader.set_epoch(progress.epoch)
        for batch in one.skip_first_batches(training.loader, progress.batch):
            if step == 4 and rank in signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            training.step(batch)
            step, progress.batch = step + 1, progress.batch + 1
            if one.should_save(step):
                one.save_state()
            if one.stopping:
                assert os.path.isdir(runs.at(root, one.save_iteration - 1))  # it is complete
                break
        if progress.batch == runs.BATCHES:
            progress.epoch, progress.batch = progress.epoch + 1, 0
    end = training.end()
    one.end_training()
    return {**end, "ended": step}


@pytest.mark.parametrize(
    ("signalled", "fsdp"), [((1,), True), ((1,), False), ((0, 1), False)], ids=str
)
def test_all_ranks_save_one_last_step_and_the_resumed_run_ends_equal(signalled, fsdp, tmp_path):
    options = {"fsdp": fsdp}
    unbroken = children.results(2, stopped, tmp_path / "unbroken", (), options)
    root = tmp_path / "run"
    one, other = children.results(2, stopped, root, signalled, options)
    assert one["ended"] == other["ended"]
    assert 5 <= one["ended"] < STEPS
    assert runs.checkpoints(root) == ["checkpoint_0", "checkpoint_1"]
    assert ringstow.verify(runs.at(root, 1)).ok
    assert_same(children.results(2, stopped, root, (), options), unbroken)


def test_a_question_without_a_policy_says_what_to_write(tmp_path):
    one = runs.accelerator(tmp_path)
    assert not one.stopping
    with pytest.raises(ringstow.InvalidStateError, match=r"RingstowAccelerator\(when="):
        one.should_save(1)
    with pytest.raises(TypeError, match=r"such as ringstow.EverySteps\(5\)"):
        runs.accelerator(tmp_path, when=5)
