"""If a rank is lost in the last save, the others name it within the grace period."""

from __future__ import annotations

import os
import re
import unittest.mock

import forked
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import ringstow
from ringstow._ranks import _group
from ringstow._state import _torch_private

TRAINING = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import ringstow
from ringstow._manager import _when
from ringstow.distributed import _save

root, grace, moment, how, rank = *sys.argv[1:5], int(sys.argv[5])
_when.BEAT_US = 1  # heard in the next step
dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=4)
begun = []

def lost(name):
    call = getattr(_save._Save, name)
    def called(*args):
        if begun and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return call(*args)
    setattr(_save._Save, name, called)

lost(moment)
when = ringstow.First() | ringstow.OnSignal(grace=grace)
state = {"w": torch.ones(5000), "own": ringstow.PerRank(rank)}
try:
    with ringstow.CheckpointManager(f"{root}/run", when=when) as manager:
        for step in range(1000):
            time.sleep(0.01)
            if manager.should_save(step):
                manager.save_async(step, state).result()
            if manager.stopping:
                break
            if step == 3:
                begun.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("took", time.monotonic() - begun[0])
"""

LOST = "the last save is not made: rank 2 on {host} does not answer, while rank {rank} of 4"


@pytest.mark.parametrize(
    ("how", "grace", "moment"),
    [("killed", 300, "_write_share"), ("killed", 300, "_meet"), ("hung", 20, "_write_share")],
)
@pytest.mark.timeout(600)
def test_the_others_name_it_within_the_grace_period(how, grace, moment, tmp_path):
    ranks = [
        forked.Program(TRAINING, tmp_path, f"{grace}s", moment, how, rank) for rank in range(4)
    ]
    ended = {rank: ranks[rank].wait(timeout=500) for rank in (0, 1, 3)}
    ranks[2].kill()
    assert ranks[2].wait().returncode < 0
    for rank, one in ended.items():
        said = LOST.format(host=os.uname().nodename, rank=rank)
        assert (one.returncode, said in one.stderr) == (1, True), one.stderr
        assert "The earlier checkpoint stays" in one.stderr
        assert float(re.search(r"took (\S+)", one.stdout)[1]) < grace
    (step,) = ringstow.steps(tmp_path / "run")
    assert step.step == 0
    assert ringstow.verify(step.path).ok


@on_ranks(2)
def test_the_limit_of_a_last_save_ends_with_its_manager(rank, tmp_path):
    group = dist.new_group(backend="gloo")
    limits = {}

    def limit(one, seconds):
        limits.setdefault(one.group_name, []).append(seconds)
        _torch_private.limit(one, seconds)

    with unittest.mock.patch.object(_group, "limit", limit):
        when = ringstow.OnSignal(grace="1h")
        with ringstow.CheckpointManager(tmp_path / "run", when=when, group=group) as manager:
            manager._side.begin_end(1000.0)
            manager.save(1, {"w": torch.ones(3)})
    (seconds,) = limits.values()  # of the group of saves; that of the user has the user's limit
    assert seconds.pop() is None
    assert 0 < min(seconds) <= max(seconds) <= 990
