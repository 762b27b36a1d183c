"""A kill at any moment leaves a checkpoint to resume from, and a failure ends the run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time

import children
import lightning_processes as processes
import pytest
from children import result
from lightning_processes import EPOCHS, EVERY
from lightning_runs import fit, state
from support import assert_same, python

import ringstow

pytestmark = pytest.mark.timeout(600)  # many processes, each of them a whole run

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "4"))

# save_last; the moment; which save. With save_last=True each second save is that of last.ckpt.
MOMENTS = [
    (None, "copying", 1),
    (None, "training", 3),
    (None, "copied", 4),
    (None, "removing", 2),
    (True, "copying", 1),
    (True, "copying", 2),
    (True, "naming", 2),
    (True, "training", 4),
    (True, "copied", 4),
    (True, "removing", 3),
    ("link", "copying", 1),
    ("link", "copying", 2),
    ("link", "copied", 3),
    ("link", "removing", 2),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return state(fit(tmp_path_factory.mktemp("unbroken"), epochs=EPOCHS))


@pytest.mark.parametrize(("save_last", "moment", "number"), MOMENTS)
def test_a_killed_run_resumes_to_the_bit(save_last, moment, number, tmp_path, unbroken):
    root = tmp_path / "run"
    code = children.exit_code(processes.killed, root, save_last, moment, number)
    assert code == -signal.SIGKILL
    kinds = 2 if save_last is True else 1
    committed = (number - 1) // kinds * EVERY
    if number > kinds:
        assert ringstow.verify(ringstow.latest(root)).ok
    begun, learned = result(processes.resumed, root, save_last)
    assert begun >= committed
    assert_same(learned, unbroken)


@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_kills_at_random_lose_no_more_than_the_save_in_flight(save_last, tmp_path, unbroken):
    chance = random.Random(f"{save_last}")
    newest = 0
    for _ in range(KILLS):
        one = children.start(processes.resumed, tmp_path, save_last)
        time.sleep(chance.uniform(0.2, 1.2))
        one.kill()
        one.join()
        if (found := ringstow.latest(tmp_path)) is not None:
            step = ringstow.load(found)["global_step"]
            assert step >= newest
            newest = step
    assert_same(result(processes.resumed, tmp_path, save_last)[1], unbroken)


@pytest.mark.parametrize("at_step", [5, 16])
def test_a_full_disk_ends_the_run_and_keeps_the_older_checkpoint(at_step, tmp_path, unbroken):
    result(processes.filling_the_disk, tmp_path, at_step)
    kept = tmp_path / f"epoch={(at_step - 1) // 6}-step={at_step // EVERY * EVERY}.ckpt"
    assert ringstow.verify(kept).ok
    assert ringstow.latest(tmp_path).path == str(kept)
    assert_same(result(processes.resumed, tmp_path, None)[1], unbroken)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_that_cannot_be_written_ends_the_run():
    root = tempfile.mkdtemp()
    try:
        os.chmod(root, 0o555)
        assert children.exit_code(processes.as_nobody, root) == 0
        assert os.listdir(root) == []
    finally:
        shutil.rmtree(root)


def test_a_failure_after_the_run_makes_the_process_exit_with_1(tmp_path):
    code = "import sys, lightning_processes as p; p.saving_after_the_run(sys.argv[1])"
    here = os.pathsep.join(filter(None, sys.path))
    done = python(code, tmp_path, env={**os.environ, "PYTHONPATH": here})
    assert done.returncode == 1, done.stderr
    assert "final-2.ckpt" in done.stderr
