"""After SIGTERM to one rank or to all, a Trainer's ranks save one last step, and resume it."""

from __future__ import annotations

import os
import re
import signal

import children
import pytest
import transformers_processes as processes
import transformers_sharded as sharded
from support import assert_same
from transformers_runs import checkpoints, state, trainer

import ringstow

pytestmark = pytest.mark.timeout(600)

# Ranks with steps of milliseconds hear of a signal within 64 of them.
STEPS = 120
OPTIONS = {"max_steps": STEPS, "logging_steps": STEPS}


def ends(root, ranks, signalled=(), **options):
    """Train on some ranks, of which some get SIGTERM in a step; return how each ended."""
    run = sharded.run if options.pop("fsdp2", False) else processes.run
    args = str(root), {**OPTIONS, **options}, "", 0, tuple(signalled)
    found = children.results(0 if ranks == 1 else ranks, run, *args)
    return [{**one, "losses": None} for one in found]  # the log's mean is since the start


def number(name):
    return int(re.fullmatch(r"checkpoint-(\d+)", name)[1])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return how a run ends that no signal stops, by the number of its ranks."""
    ended = {}

    def of(ranks, **options):  # evaluations draw random numbers, too
        known = ranks, *options.items()
        if known not in ended:
            root = tmp_path_factory.mktemp("unbroken")
            ended[known] = ends(root, ranks, save_strategy="no", **options)
        return ended[known]

    return of


@pytest.mark.parametrize(
    ("ranks", "signalled", "options"),
    [
        (2, [0, 1], {"save_strategy": "steps", "save_steps": 50, "save_total_limit": 1}),
        (1, [0], {"save_strategy": "epoch", "save_total_limit": 1, "eval_strategy": "epoch"}),
        (2, [1], {"save_strategy": "no"}),
        (2, [1], {"save_strategy": "no", "fsdp2": True}),
    ],
    ids=str,
)
def test_all_ranks_save_one_last_step_and_the_resumed_run_ends_equal(
    ranks, signalled, options, tmp_path, unbroken
):
    found = ends(tmp_path, ranks, signalled, enable_jit_checkpoint=True, **options)
    (last,) = checkpoints(tmp_path)
    assert {one["step"] for one in found} == {number(last)}
    assert 5 <= number(last) < STEPS
    said = f"SIGTERM ends the training of {tmp_path} after step {number(last)}"
    assert said in found[0]["said"][0]
    assert ringstow.verify(tmp_path / last).ok
    same = {key: one for key, one in options.items() if key in ("eval_strategy", "fsdp2")}
    assert_same(ends(tmp_path, ranks, save_strategy="no", **same), unbroken(ranks, **same))


def test_a_signal_between_the_trainers_making_and_its_training_is_heard(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, enable_jit_checkpoint=True, save_strategy="no", **OPTIONS)
    stock = next(one for one in run.callback_handler.callbacks if hasattr(one, "jit_manager"))
    stock.jit_manager.kill_wait = 0
    os.kill(os.getpid(), signal.SIGTERM)
    while not stock.jit_manager.is_checkpoint_requested:
        pass
    run.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_policies_save_besides_the_strategy_and_a_grace_that_is_over_saves_nothing(tmp_path):
    run = trainer(tmp_path / "steps", save_strategy="no", max_steps=5)
    run.ringstow_when = ringstow.AtSteps([2, 4])
    run.train()
    assert checkpoints(tmp_path / "steps") == ["checkpoint-2", "checkpoint-4"]
    run = trainer(tmp_path / "late", save_strategy="no", **OPTIONS)
    run.ringstow_when = ringstow.OnSignal(grace="1ms")
    run.add_callback(processes.Signalled())
    run.train()
    assert checkpoints(tmp_path / "late") == []
    assert run.state.global_step < STEPS


def test_a_policy_that_is_none_is_named(tmp_path):
    run = trainer(tmp_path)
    run.ringstow_when = 500
    with pytest.raises(TypeError, match=r"such as ringstow.EverySteps\(500\)"):
        run.train()
    # The Trainer can be used again.
    run.ringstow_when = None
    run.train()
    assert state(run)["step"] == 8
