"""A save that is killed at any moment leaves the last committed checkpoint intact."""

import os
import random
import signal
import time

import pytest
from support import litter, python_start

import ringstow

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "12"))

SAVER = """
import sys
import numpy as np, ringstow
path, step = sys.argv[1], int(sys.argv[2])
config = ringstow.Config(block_bytes=64 << 10, pool_bytes=1 << 20)
while True:
    step += 1
    state = {"step": step, "parts": [np.full(1 << 18, step + i) for i in range(8)]}  # 16 MiB
    handle = ringstow.save_async(state, path, config=config)
    handle.result()
    print(step, flush=True)
"""


@pytest.mark.timeout(600)
def test_kill_at_random_keeps_the_last_committed_step(tmp_path):
    path = tmp_path / "c"
    chance = random.Random(20240601)
    committed = killed_within = 0
    for _ in range(KILLS):
        process = python_start(SAVER, path, committed)
        process.stdout.readline()  # at least one step is committed
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        killed_within += bool(litter(path))

        back = ringstow.load(path)
        told = [int(line) for line in out.split()]
        assert back["step"] >= max([committed + 1, *told])
        for i, part in enumerate(back["parts"]):
            assert (part == back["step"] + i).all()
        assert ringstow.verify(path).ok
        committed = back["step"]
    assert KILLS < 10 or killed_within, "no kill fell into a save: the test shows nothing"
    ringstow.save({"end": 1}, path)
    assert litter(path) == []
