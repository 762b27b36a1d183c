"""What is the newest step, what counts as one, and what a manager never removes or replaces."""

import logging
import os
import shutil
import subprocess
import sys
import time

import pytest
import stepped_clock
import torch

import ringstow
from ringstow._reports._checkpoint_reports import Step


def state(value):
    return {"w": torch.full((10,), float(value))}


def value(path):
    return float(ringstow.load(path)["w"][0])


def save_all(run, *steps, **rules):
    with ringstow.CheckpointManager(run, **rules) as manager:
        for step in steps:
            manager.save(step, state(step))


def names(run):
    return sorted(name for name in os.listdir(run) if not name.startswith("."))


def test_a_copy_of_a_step_in_the_run_is_none_and_stays(at):
    run = at / "run"
    save_all(run, 1, 2, 3)
    copies = ["best", "step-3", "step-00000003.bak", "z-backup-of-3", "step-00000099"]
    for name in copies:
        shutil.copytree(run / "step-00000003", run / name)
    with ringstow.CheckpointManager(run, keep=2) as manager:
        assert [step.step for step in manager.steps()] == [1, 2, 3]
        for step in (4, 5, 6):
            manager.save(step, state(step))
        manager.save(3, state(33))
        assert manager.restore().step == 3, "the run has gone back"
        with pytest.raises(ringstow.InvalidStateError, match="is a copy of"):
            manager.save(99, state(99))
    assert names(run) == sorted([*copies, "step-00000003", "step-00000006"])
    assert {value(run / name) for name in copies} == {3.0}


def test_a_link_at_the_name_of_a_step_is_refused(at):
    ringstow.save(state(42), at / "precious", step=5)
    (at / "run").mkdir()
    (at / "run/step-00000005").symlink_to(at / "precious")
    with pytest.raises(ringstow.InvalidStateError, match="is a link"):
        save_all(at / "run", 5)
    save_all(at / "run", 6, 7, keep=1)
    assert value(at / "precious") == 42


def test_what_is_saved_after_going_back_is_newer(at, caplog):
    run = at / "run"
    save_all(run, 10, 20, 30, 40)
    with ringstow.CheckpointManager(run, keep=2) as manager, caplog.at_level("WARNING"):
        assert manager.restore(30).step == 30
        assert "step 30 is restored, and" in caplog.text
        assert "has newer ones: 40" in caplog.text
        manager.save(31, state(31))
    assert "the run has gone back" in caplog.text
    with ringstow.CheckpointManager(run, keep=2) as manager:
        assert manager.restore().step == 31
        assert manager.latest().step == 31
        manager.save(32, state(32))
        assert [step.step for step in manager.steps()] == [31, 32]
    assert ringstow.latest(run).path.endswith("step-00000032")


def test_drop_newer_needs_the_name_of_a_step(at):
    with ringstow.CheckpointManager(at) as manager, pytest.raises(ValueError, match="you name"):
        manager.restore(drop_newer=True)


def test_save_after_drop_newer_goes_on_and_does_not_warn(at, caplog):
    save_all(at / "run", 1, 2, 3)
    with ringstow.CheckpointManager(at / "run") as manager:
        manager.restore(1, drop_newer=True)
        manager.save(2, state(22))
    assert "gone back" not in caplog.text
    assert value(ringstow.latest(at / "run")) == 22


def test_drop_newer_leaves_no_step_whose_copy_is_in_progress(at):
    run, tier = at / "run", at / "tier"
    with ringstow.CheckpointManager(run, tiers=ringstow.Tiers([tier], rate="2M")) as manager:
        manager.save(1, state(1))
        assert manager.wait_promoted()
        manager.save(2, {"w": torch.zeros(500_000)})  # its copy takes a second
        while not (tier / "step-00000002").exists():
            time.sleep(0.001)
        assert manager.restore(1, drop_newer=True).step == 1
        manager.wait_promoted()
        assert [step.step for step in ringstow.steps(tier)] == [1]
    with ringstow.CheckpointManager(run, tiers=[tier]) as manager:
        assert manager.restore().step == 1


def test_step_that_is_the_newest_again_is_copied_if_its_copy_gave_way(at):
    run, tier = at / "run", at / "tier"
    with ringstow.CheckpointManager(run, tiers=ringstow.Tiers([tier], rate="4M")) as manager:
        manager.save(1, {"w": torch.zeros(500_000)})  # its copy takes half a second
        manager.save(2, state(2))
        manager.save(3, state(3))  # whose copy overtakes that of 2
        assert manager.restore(2, drop_newer=True).step == 2
        assert manager.wait_promoted()
        assert [step.step for step in ringstow.steps(tier)] == [1, 2]


def test_a_kept_step_that_somebody_has_removed_can_be_released(at):
    with ringstow.CheckpointManager(at / "run") as manager:
        manager.save(4, state(4))
        manager.keep(4)
        assert manager.release(4) is True
        assert manager.release(4) is False
        manager.keep(4)
        ringstow.remove(at / "run/step-00000004")
        with pytest.raises(ringstow.NoCheckpointError):
            manager.keep(4)
        assert manager.release(4) is True, "else the next save of step 4 would be kept"
        with pytest.raises(ringstow.NoCheckpointError):
            manager.release(4)


def test_each_removal_is_logged_with_its_reason_and_listed_by_ls(at, caplog):
    with caplog.at_level(logging.INFO, logger="ringstow"):
        save_all(at / "run", 1, 2, keep=1)
    assert "step-00000001 is removed: no rule keeps it" in caplog.text
    shutil.copytree(at / "run/step-00000002", at / "run/mine")
    told = subprocess.check_output([sys.executable, "-m", "ringstow", "ls", at / "run"], text=True)
    assert "removed: step-00000001 at " in told
    assert "no rule keeps it" in told
    assert "mine was saved as step-00000002, and copied or renamed" in told


PROGRAM = """
import os, sys, torch, ringstow
run, file = sys.argv[1], os.environ["CLOCK_FILE"]
for ahead, steps in ((0, (10, 20)), (90000, (30,)), (-3600, (40,)), (10**11, (50,)), (0, (41, 42))):
    open(file, "w").write(str(ahead))
    with ringstow.CheckpointManager(run, keep=ringstow.Retention(last=1, every=10)) as manager:
        manager.restore(40 if 41 in steps else None)
        for step in steps:
            manager.save(step, {"w": torch.full((4,), float(step))})
            found = {one.step: one for one in manager.steps()}
            assert step in found and manager.restore().step == step, (ahead, step, found)
            assert found[step].created.year >= 2026
print(sorted(found))
"""


def test_clocks_that_step_back_and_forth_change_no_order(at):
    env = stepped_clock.environment(at)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, at / "run"], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[10, 20, 30, 40, 42, 50]"


def test_a_time_beyond_the_year_9999_is_shown_as_its_end():
    unknown = {"metrics": {}, "dropped": (), "nbytes": None, "problem": None}
    far = 316_540_000_000_000_000
    step = Step(path="x", step=1, created_unix_ms=far, status="committed", **unknown)
    assert step.created.year == 9999
