"""After a signal to one rank or to all, Lightning saves one last step on all, and resumes it."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import children
import pytest
import torch
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


def train(rank, ranks, root, signalled, number, ckpt_path, results):
    """Train, as a rank that may get a signal; exit with 7 at SIGTERMException."""
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
        pathlib.Path(f"{results}.{rank}").write_text(str(run.global_step))
        sys.exit(7)
    torch.save(state(run), f"{results}.{rank}")


def requeued(rank, ranks, root, signalled, number, ckpt_path, results):
    """Train in a job of Slurm's, as Lightning sees one."""
    of_slurm = {
        "NTASKS": ranks,
        "NTASKS_PER_NODE": ranks,
        "NNODES": 1,
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": 0,
        "JOB_ID": 4321,
        "JOB_NAME": "training",
        "NODELIST": "127.0.0.1",
    }
    os.environ.update({f"SLURM_{name}": str(value) for name, value in of_slurm.items()})
    os.environ["PATH"] = f"{root}:{os.environ['PATH']}"
    train(rank, ranks, root, signalled, number, ckpt_path, results)


def ended(run, ranks, root, results, signalled=(), number=signal.SIGTERM, ckpt_path=None):
    args = root, signalled, number, ckpt_path, results
    outputs = [f"{results}.{rank}.log" for rank in range(ranks)]
    if ranks == 1:
        return [children.exit_code(run, 0, 1, *args, output=outputs[0])]
    return children.exit_codes(ranks, run, *args, outputs=outputs)


def printed(results):
    return [one.read_text() for one in sorted(results.parent.glob("end.*.log"))]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return how a run of two ranks ends that no signal stops; that of one rank is equal."""
    root = tmp_path_factory.mktemp("unbroken")
    assert ended(train, 2, root / "run", root / "end") == [0, 0]
    return torch.load(root / "end.0")


@pytest.mark.parametrize(("ranks", "signalled"), [(1, [0]), (2, [1]), (2, [0, 1])])
def test_sigterm_saves_one_last_step_on_all_ranks_and_the_resumed_run_ends_equal(
    ranks, signalled, tmp_path, unbroken
):
    root, results = tmp_path / "run", tmp_path / "end"
    codes = ended(train, ranks, root, results, signalled)
    assert codes == [7] * ranks, printed(results)
    steps = {int(pathlib.Path(f"{results}.{rank}").read_text()) for rank in range(ranks)}
    newest = ringstow.latest(root)
    assert steps == {newest.step}
    assert 5 <= newest.step < STEPS
    assert ringstow.verify(newest.path).ok
    assert ended(train, ranks, root, results, ckpt_path=newest.path) == [0] * ranks
    for rank in range(ranks):
        assert_same(torch.load(f"{results}.{rank}"), unbroken)


def test_slurms_requeue_saves_between_two_steps_and_the_next_job_ends_equal(tmp_path, unbroken):
    root, results = tmp_path / "run", tmp_path / "end"
    root.mkdir()
    scontrol = root / "scontrol"
    # The save must be there before the job is killed for its requeue.
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" > {root}/asked; ls {root}/*/manifest.json > {root}/is\n'
    )
    scontrol.chmod(0o755)
    codes = ended(requeued, 2, root, results, [0, 1], signal.SIGUSR1)
    assert codes == [0, 0], printed(results)
    assert (root / "asked").read_text() == "requeue 4321\n"
    assert (root / "is").read_text() == f"{root}/hpc_ckpt_1.ckpt/manifest.json\n"
    step = ringstow.open(root / "hpc_ckpt_1.ckpt").info.step
    assert 5 <= step < STEPS
    assert ended(requeued, 2, root, results) == [0, 0]  # Lightning finds it by itself
    assert_same(torch.load(f"{results}.0"), unbroken)


def test_a_run_that_ends_leaves_the_handlers_as_they_were(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    trainer(tmp_path, RingstowSignals(), io=RingstowCheckpointIO(), epochs=1).fit(model())
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
