"""After SIGTERM to one rank or to all, torchtitan saves one last step, and resumes it."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torchtitan_processes as processes
from support import assert_same

import ringstow

pytestmark = pytest.mark.timeout(600)

STEPS = 90  # ranks with short steps hear of a signal within 64 of them
OPTIONS = {"interval": 1000, "last_save_model_only": False}


def stopped(rank, ranks, root, results, signalled):
    """Train, as a rank that may get SIGTERM within its fifth step; store where it ended."""
    import torchtitan_runs

    when = ringstow.OnSignal(signal.SIGTERM, grace="120s")
    settings = torchtitan_runs.settings(**OPTIONS, ringstow_when=when)
    run = torchtitan_runs.trainer(root, settings, steps=STEPS)
    step = run.train_step

    def train_step(batches):
        if run.step == 5 and rank in signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batches)

    run.train_step = train_step
    run.train()
    run.close()
    assert run.checkpointer.stopping == bool(signalled)
    learned = torchtitan_runs.whole(run)
    torch.save({**learned, "ended": run.step}, f"{results}.{rank}")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return what a run of two ranks learns that no signal stops."""
    at = tmp_path_factory.mktemp("unbroken")
    assert processes.exit_codes(2, stopped, at / "run", at / "end", ()) == [0, 0]
    return torch.load(at / "end.0", weights_only=False)


@pytest.mark.parametrize("signalled", [(1,), (0, 1)], ids=str)
def test_all_ranks_save_one_last_step_and_the_resumed_run_ends_equal(signalled, tmp_path, unbroken):
    root, results = tmp_path / "run", tmp_path / "end"
    assert processes.exit_codes(2, stopped, root, results, signalled) == [0, 0]
    ended = {torch.load(f"{results}.{rank}", weights_only=False)["ended"] for rank in range(2)}
    newest = ringstow.latest(root / "checkpoint")
    assert ended == {newest.step}
    assert 5 <= newest.step < STEPS
    assert ringstow.verify(newest.path).ok
    assert processes.exit_codes(2, stopped, root, results, ()) == [0, 0]
    assert_same(torch.load(f"{results}.0", weights_only=False), unbroken)
