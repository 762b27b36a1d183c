"""A kill at any moment leaves a checkpoint to resume from, on one rank and on two."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time

import children
import pytest
import transformers_processes as processes
from support import assert_same
from transformers.trainer_utils import get_last_checkpoint
from transformers_runs import EVERY, STEPS, checkpoints, fit, state

import ringstow

pytestmark = pytest.mark.timeout(600)  # many processes, each of them a whole run

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "3"))
MOMENTS = [("preparing", 1), ("copying", 3), ("committed", 2), ("complete", 3), ("named", 1)]
OPTIONS = {"save_total_limit": 2}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return {**state(fit(tmp_path_factory.mktemp("unbroken"))), "said": []}


def both_ended(root, at, *moment):
    """Run on two ranks to the end or the kill; return how they ended and what they printed."""
    outputs = [at / f"{rank}.log" for rank in range(2)]
    codes = children.exit_codes(2, processes.run, root, OPTIONS, *moment, outputs=outputs)
    return codes, [one.read_text() for one in outputs]


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
    codes = children.exit_codes(0, processes.run, tmp_path, OPTIONS, moment, number)
    assert codes == [-signal.SIGKILL]
    # The save of this number is not there before its name; a removal comes after the third save.
    before = 3 if moment in ("named", "removing") else number - 1
    assert newest(tmp_path) == before * EVERY
    assert_same(children.results(0, processes.run, tmp_path, OPTIONS), [unbroken])
    assert len(checkpoints(tmp_path)) == 2  # nothing hidden is left


def test_kills_at_random_lose_no_more_than_the_save_in_flight(tmp_path, unbroken):
    chance = random.Random(0)
    root, pipe = tmp_path / "run", tmp_path / "pipe"
    root.mkdir()
    os.mkfifo(pipe)
    found = 0
    for _ in range(KILLS):
        (one,) = children.start_ranks(0, processes.run, root, OPTIONS, outputs=[pipe])
        with open(pipe) as printed:
            for _ in itertools.takewhile(lambda line: "'loss'" not in line, printed):
                pass
            time.sleep(chance.uniform(0, 0.2))  # any moment will do
            one.kill()
            one.join()
        assert newest(root) >= found
        found = newest(root)
    (end,) = children.results(0, processes.run, root, OPTIONS)
    expected = dict(unbroken)
    if found == STEPS:  # no step was left, and then the Trainer restores no random numbers
        end["random"] = expected["random"] = None
    assert_same(end, expected)


def test_two_ranks_save_and_resume_to_the_bit(tmp_path):
    whole, root = tmp_path / "whole", tmp_path / "run"
    expected = children.results(2, processes.run, whole, OPTIONS)
    names = sorted(os.listdir(whole / "checkpoint-8"))
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(names)
    codes, texts = both_ended(root, tmp_path, "complete", 2)
    assert codes[0] == -signal.SIGKILL, texts
    assert codes[1] not in (0, None), texts
    assert newest(root) == EVERY
    assert_same(children.results(2, processes.run, root, OPTIONS), expected)


def test_a_failure_of_rank_0_ends_both_ranks(tmp_path):
    root = tmp_path / "run"
    codes, texts = both_ended(root, tmp_path, "failing", 2)
    assert codes == [1, 1], texts
    assert "OSError: [Errno 28]" in texts[0]
    assert "rank 0 failed: OSError: [Errno 28]" in texts[1]
    assert checkpoints(root) == [f"checkpoint-{EVERY}"]
