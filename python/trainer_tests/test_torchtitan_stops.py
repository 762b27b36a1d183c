"""After SIGTERM to one rank or to all, torchtitan saves one last step, and resumes it."""

from __future__ import annotations

import os
import signal

import children
import pytest
from support import assert_same
from torchtitan_processes import results

import ringstow

pytestmark = pytest.mark.timeout(600)

STEPS = 90  # ranks with short steps hear of a signal within 64 of them
OPTIONS = {"interval": 1000, "last_save_model_only": False}


def stopped(rank, ranks, root, signalled):
    """Train, as a rank that may get SIGTERM within its fifth step; return where it ended."""
    import torchtitan_runs

    when = ringstow.OnSignal(signal.SIGTERM, grace="120s")
    settings = torchtitan_runs.settings(**OPTIONS, ringstow_when=when)
    run = torchtitan_runs.trainer(root, settings, steps=STEPS)

    def act(*_):
        if run.step == 5 and rank in signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    children.before(run, "train_step", act)
    run.train()
    run.close()
    assert run.checkpointer.stopping == bool(signalled)
    return run.step, torchtitan_runs.whole(run)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return what a run of two ranks learns that no signal stops."""
    return results(2, stopped, tmp_path_factory.mktemp("unbroken"), ())[0]


@pytest.mark.parametrize("signalled", [(1,), (0, 1)], ids=str)
def test_all_ranks_save_one_last_step_and_the_resumed_run_ends_equal(signalled, tmp_path, unbroken):
    ended = {step for step, _ in results(2, stopped, tmp_path, signalled)}
    newest = ringstow.latest(tmp_path / "checkpoint")
    assert ended == {newest.step}
    assert 5 <= newest.step < STEPS
    assert ringstow.verify(newest.path).ok
    assert_same(results(2, stopped, tmp_path, ())[0], unbroken)
