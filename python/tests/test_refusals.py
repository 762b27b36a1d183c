"""Refusals by the system: a clear error, no lost data, no leftovers; the next save recovers."""

import errno
import os
import pathlib
import pickle
import re
import resource
import tempfile

import numpy as np
import pytest
import torch
from support import assert_same, litter, missing, mounted, python  # noqa: F401

import ringstow

MIB = 1 << 20
NOBODY = 65534  # user and group


@pytest.fixture
def small_disk(mount):
    return mount("size=16m")


@pytest.fixture
def open_folder():
    """A folder that an ordinary user can access, and write to if its mode permits."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield pathlib.Path(name)


def as_nobody(act, *limits):
    """Run a function as an ordinary user; return its result, or the exception.

    It runs in a forked child, because such a user may not be able to start this Python.
    """
    if os.geteuid() != 0:
        missing("only root can become an ordinary user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for limit in limits:
            resource.setrlimit(*limit)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            outcome = act()
        except BaseException as error:
            outcome = error
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


@pytest.mark.parametrize("engine", ["auto", "portable"])
def test_a_full_disk_loses_nothing(engine, small_disk):
    config = ringstow.Config(engine=engine, pool_bytes=2 * MIB, block_bytes=MIB)
    ringstow.save({"a": torch.ones(MIB)}, small_disk / "c", config=config)
    before = os.statvfs(small_disk).f_bavail
    for path in ("c", "new"):
        with pytest.raises(OSError, match=str(small_disk / path)) as caught:
            ringstow.save({"a": torch.ones(32 * MIB)}, small_disk / path, config=config)
        assert caught.value.errno == errno.ENOSPC
        assert re.search(r"needs \d+ bytes .* which has \d+ free", str(caught.value))
        assert litter(small_disk / path) == []
    assert not (small_disk / "new" / "manifest.json").exists()
    assert os.statvfs(small_disk).f_bavail == before
    assert torch.equal(ringstow.load(small_disk / "c")["a"], torch.ones(MIB))


def test_full_disk_in_the_background_raises(small_disk):
    handle = ringstow.save_async({"a": torch.ones(32 * MIB)}, small_disk / "c")
    with pytest.raises(OSError, match="space") as caught:
        handle.result()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"keep": 3}, ["keep + 1", "keep=3 for 4"]),
        (
            {"keep": ringstow.Retention(every=100, best=("loss", "min", 2))},
            ["last=1 for 2", "every=100 and best=('loss', 'min', 2)"],
        ),
        ({}, ["no rule", "keep=n", "n + 1"]),
    ],
)
def test_full_disk_names_the_rules_and_the_room_that_they_need(small_disk, rules, said):
    state = {"a": torch.ones(8 * MIB)}
    with ringstow.CheckpointManager(small_disk / "run", **rules) as manager:
        calls = [
            lambda: manager.save(1, state),
            lambda: manager.save_async(1, state).result(),
            lambda: manager.save_async(1, state) and manager.wait(),
        ]
        for call in calls:
            with pytest.raises(OSError, match="free") as caught:
                call()
            assert caught.value.errno == errno.ENOSPC
            assert all(str(caught.value).count(part) == 1 for part in said), caught.value
    with pytest.raises(OSError, match="free") as caught:
        ringstow.save(state, small_disk / "alone")
    assert "keep" not in str(caught.value)  # the call has no such argument


def test_engine_missing_in_the_wheel_is_refused():
    with pytest.raises(ringstow.UnsupportedError, match="cargo feature `tokio-uring`"):
        ringstow.Config(engine="tokio-uring")


def test_unwritable_directory_is_a_permission_error(open_folder):
    error = as_nobody(lambda: ringstow.save({"a": 1}, open_folder / "c"))
    assert type(error) is PermissionError
    assert str(error).count(str(open_folder / "c")) == 1
    assert list(open_folder.iterdir()) == []


def test_a_checkpoint_that_may_not_be_written_stays(open_folder):
    ringstow.save({"a": 5}, open_folder / "c")
    error = as_nobody(lambda: ringstow.save({"a": 1}, open_folder / "c"))
    assert type(error) is PermissionError
    assert ringstow.load(open_folder / "c") == {"a": 5}
    assert litter(open_folder / "c") == []


def test_unreadable_checkpoint_is_a_permission_error(open_folder):
    ringstow.save({"a": 5}, open_folder / "c")
    os.chmod(open_folder / "c", 0o700)
    assert type(as_nobody(lambda: ringstow.load(open_folder / "c"))) is PermissionError


def test_low_memlock_limit_is_reported_with_a_fix(open_folder):
    os.chmod(open_folder, 0o777)
    state = {"a": np.ones(MIB)}
    small = (resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    report = as_nobody(lambda: ringstow.save(state, open_folder / "c"), small)
    if report.engine != "uring":
        missing("no io_uring here")
    told = " ".join(f"{fallback.reason} {fallback.remedy}" for fallback in report.fallbacks)
    assert "memlock" in told.lower()
    assert "ulimit" in told
    assert_same(ringstow.load(open_folder / "c"), state)


def test_unsavable_state_changes_no_files(tmp_path):
    ringstow.save({"a": 1}, tmp_path / "c")
    for bad in ({"a": object()}, {"a": torch.ones(2, device="meta")}):
        with pytest.raises(ringstow.Error):
            ringstow.save(bad, tmp_path / "c")
        with pytest.raises(ringstow.Error):
            ringstow.save(bad, tmp_path / "new")
    assert ringstow.load(tmp_path / "c") == {"a": 1}
    assert not (tmp_path / "new").exists()


def test_memory_stays_within_the_pool(tmp_path):
    code = """
import resource, sys, threading, time
import numpy as np, ringstow

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

state = {str(i): np.ones(8 << 20) for i in range(8)}  # 512 MiB
config = ringstow.Config(pool_bytes=32 << 20)
before, peak = rss(), 0
handle = ringstow.save_async(state, sys.argv[1], config=config)
while not handle.done():
    peak = max(peak, rss())
    time.sleep(0.001)
handle.result()
extra = (peak - before) >> 20
assert extra <= 32 + 64, f"{extra} MiB"
"""
    python(code, tmp_path / "c", check=True)


FALLBACKS = """
import ringstow, sys
folder = sys.argv[1]
for step in range(3):
    report = ringstow.save({"a": step}, f"{folder}/step-{step}")
    assert report.fallbacks
    ringstow.load(f"{folder}/step-{step}")
ringstow.verify(f"{folder}/step-0")
import warnings
warnings.simplefilter("ignore")  # torch and its add-ons have some at the import
import ringstow.dcp, torch, torch.distributed.checkpoint as dcp
from ringstow.convert import convert
writer, state = ringstow.dcp.StorageWriter(), {"a": torch.ones(9)}
dcp.save(state, checkpoint_id=f"{folder}/dcp", storage_writer=writer, no_dist=True)
assert writer.report.fallbacks
assert convert(f"{folder}/dcp", f"{folder}/hf", target="hf").save.fallbacks
"""


def test_fallback_is_warned_of_once_per_process(mount):
    ran = python(FALLBACKS, mount("mode=700", "ramfs"), check=True)
    assert ran.stderr.count("does not take O_DIRECT") == 1, ran.stderr
    lines = ran.stderr.splitlines()
    assert len(lines) == len(set(lines))
    for line in lines:  # each with its remedy
        assert re.fullmatch(r".* instead of .*: .*; .+", line), line
