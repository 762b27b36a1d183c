"""A training that is killed again and again ends as one that never was."""

from __future__ import annotations

import os
import pathlib
import random
import sys
import time

import forked
import pytest
import torch
from support import assert_same

import ringstow

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import train

KILLS = int(os.environ.get("RINGSTOW_TEST_KILLS", "6"))


def start(root, result):
    return forked.Program(forked.SCRIPT, root, result, name=train.__file__)


def directories(root):
    """Return the directories that take room: steps, and whatever is on its way in or out."""
    return sorted(name for name in os.listdir(root) if holds(root / name)) if root.exists() else []


def holds(directory):
    """Whether something is in a directory: a kill before the last call of a removal leaves it."""
    try:
        return bool(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def newest(root):
    found = [name for name in directories(root) if (root / name / "manifest.json").exists()]
    return found[-1] if found else None


@pytest.mark.timeout(600)
def test_killed_training_resumes_bit_equal_and_keeps_to_its_rules(root, tmp_path):
    never = start(tmp_path / "never killed", tmp_path / "never.pt").wait()
    assert never.returncode == 0, never.stderr

    chance = random.Random(20261123)
    within = 0
    most = 0
    for _ in range(KILLS):
        before = newest(root)
        program = start(root, tmp_path / "killed.pt")
        until = time.monotonic() + 60  # a training that ends or hangs
        while newest(root) == before and time.monotonic() < until:
            most = max(most, len(directories(root)))
        for _ in range(chance.randrange(60)):  # some moment of the next saves and removals
            most = max(most, len(directories(root)))
            time.sleep(0.001)
        program.kill()
        assert program.wait().returncode in (0, -9)
        most = max(most, len(directories(root)))
        within += any(list((root / name).glob("*.part")) for name in directories(root))
        for found in ringstow.steps(root):
            if found.status == "committed":
                assert ringstow.verify(found.path).ok
        if (tmp_path / "killed.pt").exists():
            break
    last = start(root, tmp_path / "killed.pt").wait()
    assert last.returncode == 0, last.stderr

    one, other = (torch.load(tmp_path / name) for name in ("never.pt", "killed.pt"))
    assert_same(one, other)
    assert most <= train.KEEP + 1
    assert directories(root) == [f"step-{step:08}" for step in (22, 24)]
    assert KILLS < 6 or within, "no kill fell into a save: the test shows nothing"


def test_a_removal_that_was_cut_short_ends_before_the_next_save(root):
    with ringstow.CheckpointManager(root) as manager:
        for step in range(5):
            manager.save(step, {"step": step})
    seen = []
    with ringstow.CheckpointManager(root, keep=2) as manager:
        manager.restore()
        assert len(directories(root)) == 5  # a restore removes nothing
        real = manager._side.save
        manager._side.save = lambda *args: seen.append(directories(root)) or real(*args)
        manager.save(5, {"step": 5})
    assert seen == [["step-00000003", "step-00000004"]]
    assert directories(root) == ["step-00000004", "step-00000005"]


def test_nothing_is_removed_before_a_save_unless_the_newest_step_is_intact(root):
    from support import flip, shards_of

    with ringstow.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, {"w": torch.full((1000,), float(step))})
    (shard,) = shards_of(root / "step-00000002")
    flip(shard, shard.stat().st_size - 1)
    (root / "step-00000003").mkdir()
    (root / "step-00000003" / "foreign.safetensors").write_bytes(b"refuses the save")
    with ringstow.CheckpointManager(root, keep=1) as manager:
        assert manager.restore(on_corrupt="previous").step == 1
        with pytest.raises(ringstow.InvalidStateError):
            manager.save(3, {"w": torch.zeros(10)})
        assert manager.restore(on_corrupt="previous").step == 1  # it is still there
