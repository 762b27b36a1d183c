"""On ranks, rank 0 holds the run, and all ranks raise alike if another job does."""

import subprocess
import sys

import torch
from ranks import raised

import ringstow

HOLDER = """
import sys, time, numpy, ringstow
manager = ringstow.CheckpointManager(sys.argv[1])
manager.save(1, {"w": numpy.zeros(10)})
print("saved", flush=True)
time.sleep(600)
"""


def saved(rank, root):
    with ringstow.CheckpointManager(root) as manager:
        return raised(lambda: manager.save(2, {"w": torch.zeros(4)}))


def test_all_ranks_raise_if_another_job_saves_into_the_run(ranks, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "saved\n"
        for _, said in ranks(2).run(saved, tmp_path):
            assert str(process.pid) in said
            assert "mix their steps" in said
    finally:
        process.kill()
        process.wait()
    assert ranks(2).run(saved, tmp_path) == [None, None]
