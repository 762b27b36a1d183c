"""Without another thread, calls fail with what to do, or do without; never a panic."""

import os

import numpy
import pytest
from support import python

import ringstow

PIDS = "/sys/fs/cgroup/pids"
CHILD = """
import os, sys, numpy, ringstow
group, path, call = sys.argv[1:]
os.mkdir(group)
with open(f"{group}/cgroup.procs", "w") as file: file.write(str(os.getpid()))
with open(f"{group}/pids.current") as file: count = file.read()
with open(f"{group}/pids.max", "w") as file: file.write(count)
try:
    print(eval(call))
except Exception as error:
    print(type(error).__name__, error)
with open(f"{group}/pids.max", "w") as file: file.write("max")
print("then", ringstow.load(path)["w"][0])
"""


@pytest.fixture
def group():
    name = f"{PIDS}/ringstow-{os.getpid()}"
    if not os.access(PIDS, os.W_OK) or not os.path.exists(f"{PIDS}/cgroup.procs"):
        pytest.skip("no cgroup to limit threads with")
    yield name
    os.rmdir(name)


def said(group, path, call):
    done = python(CHILD, group, path, call, limit=60)
    assert "panicked" not in done.stderr
    assert done.stdout.endswith("then 1.0\n"), done
    return done.stdout


@pytest.mark.parametrize("call", ["load", "verify", "save"])
def test_without_another_thread_an_error_says_which_limit_to_raise(group, call, tmp_path):
    path = tmp_path / "a"
    ringstow.save({"w": numpy.ones(100_000)}, path)
    calls = {"save": "ringstow.save({}, path + '-b')"}
    text = said(group, path, calls.get(call, f"ringstow.{call}(path)"))
    assert "BlockingIOError" in text
    assert "ulimit -u" in text
    assert "pids.max" in text


def test_program_works_on_the_only_thread_or_says_which_limit_to_raise(group, tmp_path):
    path = tmp_path / "a"
    ringstow.save({"w": numpy.ones(100_000)}, path)
    text = said(group, path, "ringstow._native.cli(['ringstow', 'verify', path])")
    assert "Panic" not in text
