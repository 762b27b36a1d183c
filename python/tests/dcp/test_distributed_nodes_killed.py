"""Ranks on nodes that share no directory are killed while they save, and nodes are lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time

import pytest
import torch
from node_runs import manager_on, root_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ringstow
from ringstow.distributed import PerRank, _commit

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "6"))
SEED = int(os.environ.get("RINGSTOW_SEED", "1"))


def state_of(rank, step):
    """Return what a rank has at a step: each differs from any other's, at any other step."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(1000.0) + 1000 * rank + step
    return {
        "sharded": DTensor.from_local(local, mesh, [Shard(0)]),
        "replicated": torch.arange(300_000.0) + step,
        "own": PerRank(torch.tensor([rank, step])),
        "step": step,
    }


def train(rank, root, steps, options):
    """Resume, check what was restored, and go on for some steps."""
    with manager_on(rank, root, **options) as manager:
        state = state_of(rank, -1)
        restored = manager.restore(into=state)
        first = 0 if restored is None else restored.step
        if restored is not None:
            expected = state_of(rank, first)
            assert state["step"] == first
            assert torch.equal(state["sharded"].to_local(), expected["sharded"].to_local())
            assert torch.equal(state["replicated"], expected["replicated"])
            assert torch.equal(state["own"].value, expected["own"].value)
        for step in range(first + 1, first + steps + 1):
            manager.save_async(step, state_of(rank, step))
    return first


def save_and_die(rank, root, victim, moment):
    """Save step 2, and kill the victim's process at a moment of it."""
    if rank == victim:
        native = _commit._native.NodeSession

        class Dying:
            def __init__(self, *args):
                self._session = native(*args)

            def __getattr__(self, name):
                return getattr(self._session, name)

            def prepare(self, *args):
                if moment == "before the manifest":
                    die()
                self._session.prepare(*args)
                if moment == "with a manifest that is not committed":
                    die()

            def commit(self):
                if moment == "before the commit":
                    # The other rank is killed once this one has died: it must have committed.
                    there = root_on(root, 1 - victim) / "step-00000002" / "manifest.json"
                    while not there.exists():
                        os.sched_yield()
                    die()
                self._session.commit()
                die()

        _commit._native.NodeSession = Dying
    with manager_on(rank, root) as manager:
        manager.save(2, state_of(rank, 2))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("moment", "newest"),
    [
        ("before the manifest", 1),
        ("with a manifest that is not committed", 1),
        ("before the commit", 2),
    ],
)
def test_kill_within_a_save_leaves_one_step_or_the_other(ranks, tmp_path, victim, moment, newest):
    assert ranks(2).run(train, tmp_path, 1, {}) == [0, 0]
    with pytest.raises(RuntimeError, match=f"rank {victim} died with exit code -9"):
        ranks(2).run(save_and_die, tmp_path, victim, moment)
    steps = 3 - newest
    assert ranks(2).run(train, tmp_path, steps, {"keep": 1}) == [newest, newest]
    for rank in (0, 1):
        run = root_on(tmp_path, rank)
        left = set(os.listdir(run)) - {".ringstow-history.jsonl", ".ringstow-node.json"}
        assert left == {"step-00000003"}
        assert ringstow.verify(run / "step-00000003").ok


@pytest.mark.timeout(900)
def test_training_that_is_killed_and_loses_nodes_restores_only_what_was_saved(ranks, tmp_path):
    """`train` checks every bit of what it restores, on each rank."""
    chance = random.Random(SEED)
    options = {"replicas": 2, "keep": 2}
    for _ in range(KILLS):
        kill_within(ranks(2), tmp_path, options, chance)
        lost = chance.choice([None, 0, 1])
        if lost is not None and any(found_whole(tmp_path, 1 - lost)):
            shutil.rmtree(root_on(tmp_path, lost))
    (last, _) = ranks(2).run(train, tmp_path, 2, options)
    assert last > 0
    for rank in (0, 1):
        newest = ringstow.latest(root_on(tmp_path, rank))
        assert newest.path == str(root_on(tmp_path, rank) / f"step-{last + 2:08}")
        assert ringstow.load(newest)["step"] == last + 2  # all of it is on each node


def kill_within(pool, root, options, chance):
    """Train, and kill all ranks at some moment after another step was committed."""
    failures = []

    def run():
        try:
            pool.run(train, root, 10**6, options)
        except Exception as error:
            failures.append(error)

    before = committed_on(root, 0)
    training = threading.Thread(target=run)
    training.start()
    while committed_on(root, 0) <= before and training.is_alive():
        time.sleep(0.001)
    for _ in range(chance.randrange(300)):
        committed_on(root, 0)
        time.sleep(0.001)
    pool.kill()
    training.join()
    assert "died with exit code -9" in str(failures[0]), failures


def committed_on(root, rank):
    """Return the number of the newest step with a manifest."""
    found = root_on(root, rank).glob("step-*/manifest.json")
    return max((int(path.parent.name[5:]) for path in found), default=0)


def found_whole(root, rank):
    """Yield the steps of which one node has all files."""
    for step in ringstow.steps(root_on(root, rank)):
        if step.status == "committed" and ringstow.verify(step.path).elsewhere == 0:
            yield step
