"""A kill at any moment leaves a checkpoint to resume from, on one rank and on two."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers_processes as processes
from support import assert_same
from transformers.trainer_utils import get_last_checkpoint
from transformers_runs import EVERY, checkpoints, fit, state

import ringstow

pytestmark = pytest.mark.timeout(600)  # many processes, each of them a whole run

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "3"))
MOMENTS = [("preparing", 1), ("copying", 3), ("committed", 2), ("complete", 3), ("named", 1)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return state(fit(tmp_path_factory.mktemp("unbroken")))


def start(root, results, *moment, ranks=1):
    command = [sys.executable]
    if ranks > 1:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", *launch, "--local-addr=localhost"]
    here = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [*command, processes.__file__, str(root), str(results), *map(str, moment)],
        env={**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(root, results, *moment, ranks=1):
    """Run to the end or the kill; return how the process ended and what it printed."""
    with start(root, results, *moment, ranks=ranks) as one:
        text, _ = one.communicate(timeout=300)
    return one.returncode, text


def newest(root):
    """Return the newest checkpoint's step as the Trainer finds it; it is whole."""
    path = get_last_checkpoint(root)
    if path is None:
        return 0
    assert ringstow.verify(path).ok
    assert os.path.exists(os.path.join(path, "trainer_state.json"))
    return int(re.search(r"-(\d+)$", path).group(1))


@pytest.mark.parametrize(("moment", "number"), [*MOMENTS, ("removing", 1)])
def test_a_killed_run_resumes_to_the_bit(moment, number, tmp_path, unbroken):
    root, results = tmp_path / "run", tmp_path / "results"
    code, text = ended(root, results, moment, number)
    assert code == -signal.SIGKILL, text
    # The save of this number is not there before its name; a removal comes after the third save.
    before = 3 if moment in ("named", "removing") else number - 1
    assert newest(root) == before * EVERY
    code, text = ended(root, results)
    assert code == 0, text
    assert_same(torch.load(f"{results}.0"), unbroken)
    assert len(checkpoints(root)) == 2  # nothing hidden is left


def test_kills_at_random_lose_no_more_than_the_save_in_flight(tmp_path, unbroken):
    chance = random.Random(0)
    root, results = tmp_path / "run", tmp_path / "results"
    root.mkdir()
    found = 0
    for _ in range(KILLS):
        with start(root, results) as one:
            for _ in itertools.takewhile(lambda line: "'loss'" not in line, one.stdout):
                pass
            time.sleep(chance.uniform(0, 0.2))  # any moment will do
            one.kill()
        assert newest(root) >= found
        found = newest(root)
    code, text = ended(root, results)
    assert code == 0, text
    assert_same(torch.load(f"{results}.0"), unbroken)


def test_two_ranks_save_and_resume_to_the_bit(tmp_path):
    whole, root, results = tmp_path / "whole", tmp_path / "run", tmp_path / "results"
    code, text = ended(whole, tmp_path / "expected", ranks=2)
    assert code == 0, text
    names = sorted(os.listdir(whole / "checkpoint-8"))
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(names)
    code, text = ended(root, results, "complete", 2, ranks=2)
    assert code != 0, text
    assert newest(root) == EVERY
    code, text = ended(root, results, ranks=2)
    assert code == 0, text
    for rank in range(2):
        assert_same(torch.load(f"{results}.{rank}"), torch.load(f"{tmp_path}/expected.{rank}"))


def test_a_failure_of_rank_0_ends_both_ranks(tmp_path):
    root = tmp_path / "run"
    code, text = ended(root, tmp_path / "results", "failing", 2, ranks=2)
    assert code == 1, text
    assert "rank 0 could not save: OSError: [Errno 28]" in text
    assert checkpoints(root) == [f"checkpoint-{EVERY}"]
