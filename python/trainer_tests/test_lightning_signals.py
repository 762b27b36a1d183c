"""After a signal to one rank or to all, Lightning saves one last step on all, and resumes it."""

from __future__ import annotations

import os
import signal

import children
import pytest
from children import results
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_runs import RingstowCheckpointIO, lightning, model, state, trainer
from support import assert_same

import ringstow
from ringstow.integrations.lightning import RingstowSignals

children.preload(__name__)
pytestmark = pytest.mark.timeout(600)

STEPS = 120  # ranks with steps of milliseconds hear of a signal within 64 of them


class Signalled(lightning.Callback):
    """Sends this process a signal within its fifth step."""

    def __init__(self, number):
        self.number = number

    def on_train_batch_start(self, run, *_):
        if run.global_step == 4:
            os.kill(os.getpid(), self.number)


def train(rank, ranks, root, signalled=(), number=signal.SIGTERM, ckpt_path=None):
    """Train, as a rank that may get a signal; return the end, or the step of SIGTERMException."""
    kept = ModelCheckpoint(dirpath=root, save_on_exception=True, save_top_k=-1, every_n_epochs=99)
    callbacks = [kept, RingstowSignals()]
    if rank in signalled:
        callbacks.append(Signalled(number))
    how = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    run = trainer(root, *callbacks, io=RingstowCheckpointIO(), epochs=-1, max_steps=STEPS, **how)
    one = model()
    try:
        run.fit(one, ckpt_path=ckpt_path)
    except SIGTERMException:
        assert run.received_sigterm
        return run.global_step
    return state(run)


def requeued(rank, ranks, root, *args):
    """Train in a job of Slurm's, as Lightning sees one."""
    names = {"NTASKS": ranks, "NTASKS_PER_NODE": ranks, "NNODES": 1, "PROCID": rank, "NODEID": 0}
    names |= {"LOCALID": rank, "JOB_ID": 4321, "JOB_NAME": "training", "NODELIST": "127.0.0.1"}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in names.items()})
    os.environ["PATH"] = f"{root}:{os.environ['PATH']}"
    return train(rank, ranks, root, *args)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return how a run of two ranks ends that no signal stops; that of one rank is equal."""
    return results(2, train, tmp_path_factory.mktemp("unbroken"))[0]


@pytest.mark.parametrize(("ranks", "signalled"), [(1, [0]), (2, [1]), (2, [0, 1])])
def test_sigterm_saves_one_last_step_on_all_ranks_and_the_resumed_run_ends_equal(
    ranks, signalled, tmp_path, unbroken
):
    count = 0 if ranks == 1 else ranks
    steps = results(count, train, tmp_path, signalled)
    newest = ringstow.latest(tmp_path)
    assert steps == [newest.step] * ranks
    assert 5 <= newest.step < STEPS
    assert ringstow.verify(newest.path).ok
    ends = results(count, train, tmp_path, (), signal.SIGTERM, newest.path)
    assert_same(ends, [unbroken] * ranks)


def test_slurms_requeue_saves_between_two_steps_and_the_next_job_ends_equal(tmp_path, unbroken):
    scontrol, root = tmp_path / "scontrol", tmp_path
    # The save must be there before the job is killed for its requeue.
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" > {root}/asked; ls {root}/*/manifest.json > {root}/is\n'
    )
    scontrol.chmod(0o755)
    results(2, requeued, root, [0, 1], signal.SIGUSR1)
    assert (root / "asked").read_text() == "requeue 4321\n"
    assert (root / "is").read_text() == f"{root}/hpc_ckpt_1.ckpt/manifest.json\n"
    step = ringstow.open(root / "hpc_ckpt_1.ckpt").info.step
    assert 5 <= step < STEPS
    assert_same(results(2, requeued, root)[0], unbroken)  # Lightning finds it by itself


def test_a_run_that_ends_leaves_the_handlers_as_they_were(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    trainer(tmp_path, RingstowSignals(), io=RingstowCheckpointIO(), epochs=1).fit(model())
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
