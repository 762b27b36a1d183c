"""The memory of background saves: training waits for the copies, and not for the disk."""

import os
import queue
import re

import pytest
import torch
from support import python, resident_bytes

import ringstow

# More than any save or load may take.
LARGE = 320 << 20

NO_DISK = ringstow.Config(write_rate=10, queue_depth=5)
"""Lets the first block through, and the next in days."""


@pytest.fixture
def state():
    return {"w": torch.ones(LARGE, dtype=torch.uint8)}


def cancelled(handle):
    handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()


@pytest.mark.parametrize("staging", ["guard", "snapshot"])
def test_step_waits_for_the_copies_and_not_for_the_disk(staging, tmp_path, state):
    """A snapshot lets no step wait, either, with as little memory as a plain save has."""
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    state["weight"] = weight
    how = {"staging": "snapshot"} if staging == "snapshot" else {}
    handle = ringstow.save_async(state, tmp_path / "c", config=NO_DISK, **how)
    optimizer.step()
    if staging == "snapshot":
        assert handle.staged()
        assert handle.wait_staged(0)
    progress = handle.progress()
    cancelled(handle)
    assert staging == "snapshot" or progress.staged == progress.total > LARGE
    assert progress.written <= 4 << 20


def test_manager_of_one_process_does_not_wait_for_the_disk_either(tmp_path, state):
    with ringstow.CheckpointManager(tmp_path / "run", config=NO_DISK) as manager:
        handle = manager.save_async(1, state)
        assert handle.wait_staged(600)
        cancelled(handle)


def test_plain_save_takes_no_more_than_before(tmp_path, state):
    ringstow.release_memory()
    report = ringstow.save(state, tmp_path / "c")
    assert report.pool_bytes == 256 << 20


def test_released_bytes_are_those_that_the_save_had(tmp_path, state):
    ringstow.release_memory()
    config = ringstow.Config(pool_bytes="64M")
    ringstow.save(state, tmp_path / "a", config=config)
    kept = resident_bytes()
    released = ringstow.release_memory()
    assert 8 << 20 <= released <= 64 << 20
    assert abs(kept - resident_bytes() - released) < 4 << 20
    assert ringstow.release_memory() == 0
    report = ringstow.save_async(state, tmp_path / "b").result()
    assert 0 < ringstow.release_memory() <= report.pool_bytes


@pytest.mark.parametrize("how", ["save_async", "manager"])
def test_nothing_is_in_use_once_the_result_is_known(how, tmp_path, state):
    """In the callback, which is the first to know."""
    ringstow.release_memory()
    released = queue.SimpleQueue()
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        if how == "manager":
            handle = manager.save_async(1, state, staging="snapshot")
        else:
            handle = ringstow.save_async(state, tmp_path / "c", staging="snapshot")
        handle.add_done_callback(lambda handle: released.put(ringstow.release_memory()))
        assert released.get() > LARGE
    assert ringstow.release_memory() == 0


def test_memory_is_kept_for_the_next_save_until_it_is_released(tmp_path, state):
    def saved(save):
        handle = save(state)
        assert handle.wait_staged(600)
        cancelled(handle)
        return resident_bytes()

    kept = saved(lambda state: ringstow.save_async(state, tmp_path / "c", config=NO_DISK))
    ringstow.release_memory()
    assert kept - resident_bytes() >= 32 << 20
    with ringstow.CheckpointManager(tmp_path / "run", config=NO_DISK) as manager:
        kept = saved(lambda state: manager.save_async(1, state))
    assert kept - resident_bytes() >= 32 << 20


def test_number_of_bytes_bounds_background_saves_too(tmp_path, state):
    config = ringstow.Config(pool_bytes="256M", write_rate=10, queue_depth=6)
    handle = ringstow.save_async(state, tmp_path / "c", config=config)
    is_staged = handle.wait_staged(0.5)
    staged = handle.progress().staged
    cancelled(handle)
    assert not is_staged
    assert staged <= 260 << 20
    assert ringstow.Config(pool_bytes="auto") == ringstow.Config(pool_bytes=0)


LITTLE_MEMORY = """
import logging, re, resource, sys
import torch, ringstow

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
state = {"w": torch.ones(384 << 20, dtype=torch.uint8)}
ringstow.save_async({"w": torch.ones(1 << 20)}, sys.argv[1] + "/first").result()
used = int(re.search(r"VmSize:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)
config = ringstow.Config(write_rate="60M")  # new memory comes faster
handle = ringstow.save_async(state, sys.argv[1] + "/c", config=config)
handle.wait_staged()
"""


def test_line_says_how_much_memory_there_was_and_why_no_more(tmp_path):
    said = python(LITTLE_MEMORY, tmp_path).stdout
    line = next(line for line in said.splitlines() if line.startswith(f"{tmp_path}/c: "))
    assert re.search(
        r", training waited .* with \d+ MB of staging memory for 403 MB: Cannot allocate memory",
        line,
    )
    assert f"{tmp_path}" in said.split("staging memory for all")[0]  # the warning


def test_copies_of_all_tensors_are_made_in_memory_that_is_kept(tmp_path, state):
    ringstow.release_memory()
    for step in range(2):
        ringstow.save_async(state, tmp_path / str(step), staging="snapshot").result()
    # Not twice: the writes from there need no more than a plain save's.
    assert LARGE < ringstow.release_memory() <= LARGE + (256 << 20)


MEASURED = """
import sys
import numpy as np
import ringstow

def resident():
    with open("/proc/self/status") as status:
        lines = [line for line in status if line.startswith(("VmRSS", "RssAnon"))]
    return max(int(line.split()[1]) for line in lines) * 1024

state = {"w": np.ones(400_000, dtype=np.float32), "step": 1}
before = resident()
handle = ringstow.save_async(state, sys.argv[1])
handle.result()
print(resident() - before)
ringstow.save(state, sys.argv[1])
"""


def test_a_first_save_of_a_small_state_takes_little_memory(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("RINGSTOW_")}
    done = python(MEASURED, tmp_path / "ckpt", env=env, check=True)
    assert int(done.stdout) <= 16 << 20
