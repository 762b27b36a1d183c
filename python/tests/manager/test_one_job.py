"""One run, one job: a second manager that saves is refused; what a kill leaves is no lock."""

import os
import signal
import subprocess
import sys
import time

import numpy
import pytest

import ringstow

STATE = {"w": numpy.zeros(10)}
HOLDER = """
import sys, time, numpy, ringstow
manager = ringstow.CheckpointManager(sys.argv[1])
manager.save(int(sys.argv[2]), {"w": numpy.zeros(10)})
print("saved", flush=True)
time.sleep(600)
"""


def holder(run, step=1):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run), str(step)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "saved\n"
    return process


def test_second_process_is_refused_with_host_process_and_since_when(tmp_path):
    process = holder(tmp_path)
    try:
        with ringstow.CheckpointManager(tmp_path) as manager:
            assert manager.restore().step == 1  # loads need no lock
            with pytest.raises(ringstow.BusyError) as caught:
                manager.save(2, STATE)
        for word in (str(process.pid), os.uname().nodename, "since", str(tmp_path)):
            assert word in str(caught.value)
        ringstow.save(STATE, tmp_path / "step-3", step=3)  # no manager
        ringstow.retain(tmp_path, keep=1)
        assert [step.step for step in ringstow.steps(tmp_path)] == [3]
    finally:
        process.kill()
        process.wait()


def test_kill_of_the_holder_frees_the_run_at_once(tmp_path):
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    with ringstow.CheckpointManager(tmp_path) as manager:
        manager.save(2, STATE)
        assert time.monotonic() - began < 4
    assert not [name for name in os.listdir(tmp_path) if "manager" in name]


def test_start_waits_for_a_job_that_is_being_killed(tmp_path, caplog):
    process = holder(tmp_path)
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {process.pid}"])
    with ringstow.CheckpointManager(tmp_path) as manager:
        manager.save(2, STATE)
    assert "to end" in caplog.text
    killer.wait()
    process.wait()


def test_second_manager_of_one_process_is_refused_until_the_first_is_closed_or_dropped(tmp_path):
    first, second = ringstow.CheckpointManager(tmp_path), ringstow.CheckpointManager(tmp_path)
    first.save(1, STATE)
    with pytest.raises(ringstow.BusyError, match="another manager of this process"):
        second.save(2, STATE)
    first.close()
    second.save(2, STATE)
    del second
    with ringstow.CheckpointManager(tmp_path) as third:
        third.save(3, STATE)


def test_forked_child_neither_holds_nor_frees_the_run(tmp_path):
    manager = ringstow.CheckpointManager(tmp_path)
    manager.save(1, STATE)
    child = os.fork()
    if child == 0:
        manager = None  # the child drops it
        time.sleep(600)
        os._exit(0)
    try:
        time.sleep(0.5)
        script = HOLDER.replace("time.sleep(600)", "")
        command = [sys.executable, "-c", script, str(tmp_path), "2"]
        refused = subprocess.run(command, capture_output=True, text=True)
        assert "BusyError" in refused.stderr
        manager.close()
        assert subprocess.run(command, capture_output=True).returncode == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_rank_without_a_process_group_does_not_save_into_another_ranks_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ringstow.CheckpointManager(tmp_path / "own") as manager:
        manager.save(1, STATE)  # a run of its own
    script = HOLDER.replace("time.sleep(600)", "manager.close()")
    subprocess.run([sys.executable, "-c", script, str(tmp_path), "1"], check=True)
    for step in (1, 2):
        with (
            ringstow.CheckpointManager(tmp_path) as manager,
            pytest.raises(ringstow.InvalidStateError, match="rank 1 of 2"),
        ):
            manager.save(step, STATE)
    with pytest.raises(ringstow.InvalidStateError, match="rank 1 of 2"):
        ringstow.save(STATE, tmp_path / "step-00000001")
