"""A reader beside another process that saves and keeps one step: it always finds one."""

import contextlib
import os
import subprocess
import sys
import tempfile

import numpy
import pytest

import ringstow

LOOKS = int(os.environ.get("RINGSTOW_TEST_LOOKS", "1000"))
WRITER = """
import os, sys, numpy, ringstow
run, end = sys.argv[1:]
step = 0
with ringstow.CheckpointManager(run, keep=1) as manager:
    while not os.path.exists(end):
        manager.save(step, {"w": numpy.full(1000, float(step)), "step": step})
        step += 1
"""


@contextlib.contextmanager
def writer(run, end):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(run), str(end)])
    try:
        while ringstow.latest(run) is None:
            assert process.poll() is None
        yield
        assert process.poll() is None, "it must not have failed"
    finally:
        end.touch()
        process.wait(60)


def program(name, run, *options):
    """What `ringstow ls` and `ringstow top` print."""
    command = [sys.executable, "-m", "ringstow", name, str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(params=["disk", "memory"])
def run(request, tmp_path):
    """Return a directory of a run: on a disk, or in memory."""
    if request.param == "disk":
        yield tmp_path / "run"
    elif not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield type(tmp_path)(name, "run")


def test_looks_beside_a_writer_that_keeps_one_step_always_find_a_step(run, tmp_path):
    def whole(state):
        assert (state["w"] == state["step"]).all(), "two steps are mixed"
        return state["step"]

    def into():
        state = {"w": numpy.zeros(1000), "step": -1}
        restored = ringstow.CheckpointManager(run).restore(into=state)
        assert restored.step == whole(state)
        return restored.step

    looks = [
        lambda: ringstow.latest(run).path,
        lambda: ringstow.latest(run, verify=True).path,
        lambda: [step.path for step in ringstow.steps(run) if step.status == "committed"][-1],
        lambda: ringstow.CheckpointManager(run).latest().path,
        lambda: whole(ringstow.CheckpointManager(run).restore().state),
        lambda: whole(ringstow.load([run])),
        lambda: ringstow.open([run]).value("step"),
        into,
    ]
    with writer(run, tmp_path / "end"):
        newest = -1
        for number in range(LOOKS):
            look = number % len(looks)
            seen = looks[look]()
            assert seen is not None, look
            step = int(seen.rpartition("-")[2]) if isinstance(seen, str) else seen
            assert step >= newest, f"look {look} found an older step than the one before"
            newest = step
        assert "step-" in program("ls", run)
        program("top", run, "--json", "--looks", "1")
