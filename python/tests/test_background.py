"""Background saves with the real engine: snapshots, exits, Ctrl-C, forks, two at once."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from support import assert_same, in_child, litter, python, python_start

import ringstow

# One small transfer at a time. `slow_bytes` adapts the size to the disk's speed.
SLOW = ringstow.Config(block_bytes=4096, pool_bytes=8192, queue_depth=1, fillers=1)
SLOW_CODE = """
import os, sys, threading, time, logging
import numpy as np, ringstow
slow = ringstow.Config(block_bytes=4096, pool_bytes=8192, queue_depth=1, fillers=1)
path, size = sys.argv[1], int(sys.argv[2])
state = {"a": np.ones(size, np.uint8)}
"""


@pytest.fixture(scope="module")
def slow_bytes(tmp_path_factory):
    """Return the number of bytes that take about two seconds to save with SLOW."""
    path, size = tmp_path_factory.mktemp("calibrate") / "c", 2 << 20
    seconds = ringstow.save({"a": torch.ones(size // 4)}, path, config=SLOW).seconds.write
    return min(max(int(2 * size / seconds), 4 << 20), 1 << 30) // 4096 * 4096


@pytest.fixture
def slow_state(slow_bytes):
    return {"a": torch.ones(slow_bytes // 4)}


@pytest.mark.parametrize("pool_bytes", [1 << 20, 256 << 20], ids=["streams", "snapshot"])
def test_changes_after_wait_staged_are_not_saved(pool_bytes, tmp_path):
    config = ringstow.Config(pool_bytes=pool_bytes, block_bytes=256 << 10)
    state = {str(i): torch.full((1 << 20,), float(i)) for i in range(16)}
    handle = ringstow.save_async(state, tmp_path / "c", config=config)
    assert handle.wait_staged()
    for tensor in state.values():
        tensor.fill_(-1)
    report = handle.result()
    assert report.tensor_bytes == 16 << 22
    back = ringstow.load(tmp_path / "c")
    assert_same(back, {str(i): torch.full((1 << 20,), float(i)) for i in range(16)})


def test_dropped_handle_and_state_do_not_harm_the_save(tmp_path):
    ringstow.save_async({"w": torch.arange(10_000_000)}, tmp_path / "c")
    ringstow.save_async({"x": torch.ones(3)}, tmp_path / "d").result()
    deadline = time.monotonic() + 300
    while not (tmp_path / "c" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert torch.equal(ringstow.load(tmp_path / "c")["w"], torch.arange(10_000_000))


def test_progress_rises_from_zero_to_all_bytes(slow_state, slow_bytes, tmp_path):
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    seen = [handle.progress()]
    while not handle.wait_staged(0.05):
        seen.append(handle.progress())
    handle.result()
    seen.append(handle.progress())
    for before, after in itertools.pairwise(seen):
        assert before.staged <= after.staged
        assert before.written <= after.written
    assert all(p.written <= p.staged <= p.total for p in seen)
    assert seen[-1].written == seen[-1].total >= slow_bytes


def test_an_emergency_save_saves_after_a_background_failure(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    handle = ringstow.save_async({"a": torch.ones(1)}, tmp_path / "file" / "c")
    while not handle.done():
        time.sleep(0.001)
    ringstow.save({"a": torch.ones(1)}, tmp_path / "c")
    assert ringstow.load(tmp_path / "c")["a"].all()
    assert [r.name for r in caplog.records if r.levelname == "ERROR"] == ["ringstow"]
    with pytest.raises(OSError, match="file"):
        handle.result()


AT_EXIT = """
import atexit
def last():
    global handle
    handle = ringstow.save_async(state, path, config=slow)
atexit.register(last)
"""


@pytest.mark.parametrize(
    "save",
    [
        "ringstow.save_async(state, path, config=slow)",
        pytest.param(
            AT_EXIT,
            marks=pytest.mark.skipif(
                sys.version_info[:2] == (3, 12), reason="starts no threads in atexit"
            ),
        ),
    ],
    ids=["before the exit", "at the exit"],
)
def test_the_interpreters_exit_waits_for_the_save(save, slow_bytes, tmp_path):
    done = python(SLOW_CODE + save, tmp_path / "c", slow_bytes)
    assert (done.returncode, done.stderr) == (0, "")
    assert ringstow.load(tmp_path / "c")["a"].sum() == slow_bytes


LAST = """
import atexit
jobs = []
atexit.register(lambda: print(jobs[0].done()))  # runs after ringstow's
"""
IN_A_DAEMON = """
from ringstow import _native

def write_rank():
    memory = ("U8", [size], None, state["a"].ctypes.data, size, None)
    item = ("a", memory, None, False)
    jobs.append(_native.start_write([item], path, 0, slow.to_json()))
    jobs[0].wait()

session = _native.Session(path, 1, slow.to_json())
threading.Thread(target=write_rank, daemon=True).start()
while not any(name.startswith("rank") for name in os.listdir(path)):
    pass
"""


def test_the_exit_waits_for_a_daemon_threads_save(slow_bytes, tmp_path):
    """Otherwise the thread takes the GIL during finalization, which may abort the process."""
    done = python(LAST + SLOW_CODE + IN_A_DAEMON, tmp_path / "c", slow_bytes)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


ENDS = {"end": "", "exit": "sys.exit(0)", "other code": "sys.exit(3)", "raise": "raise ValueError"}


@pytest.mark.parametrize("end", ENDS)
def test_unreported_failure_is_logged_and_fails_the_exit(end, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code = "print('flushed at exit', end='')\nhandle = ringstow.save_async(state, path)\n"
    done = python(SLOW_CODE + code + ENDS[end], tmp_path / "file" / "c", 1)
    assert done.returncode == (3 if end == "other code" else 1)
    assert done.stdout == "flushed at exit"
    assert f"the save to {tmp_path}/file/c failed" in done.stderr
    assert f"exit code 1, since the background save to {tmp_path}/file/c failed" in done.stderr


@pytest.mark.parametrize("ask", ["result()", "wait_staged()", "cancel()"])
def test_reported_failure_does_not_fail_the_exit(ask, tmp_path):
    (tmp_path / "file").write_text("in the way")
    where, how = ("c", ", config=slow") if ask == "cancel()" else ("file/c", "")
    code = (
        f"handle = ringstow.save_async(state, path{how})\ntry: handle.{ask}\nexcept OSError: pass"
    )
    done = python(SLOW_CODE + code, tmp_path / where, 1 << 24)
    assert (done.returncode, done.stderr) == (0, "")


def test_cancelling_keeps_the_earlier_checkpoint_and_leaves_no_files(slow_state, tmp_path):
    ringstow.save({"a": 1}, tmp_path / "c")
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    handle.wait_staged(0.1)
    handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError) as caught:
        handle.result(timeout=300)
    assert caught.value.path == str(tmp_path / "c")
    assert ringstow.load(tmp_path / "c") == {"a": 1}
    assert litter(tmp_path / "c") == []


@pytest.mark.parametrize(
    "wait",
    [
        "ringstow.save(state, path, config=slow)",
        "h = ringstow.save_async(state, path, config=slow); h.wait_staged(); h.cancel()",
        "h = ringstow.save_async(state, path, config=slow); h.result(); h.cancel()",
    ],
    ids=["save", "wait_staged", "result"],
)
def test_ctrl_c_ends_the_wait(wait, slow_bytes, tmp_path):
    code = f"""{SLOW_CODE}
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
try:
    print("ready", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if "h" in globals():
        h.cancel()
"""
    process = python_start(code, tmp_path / "c", 4 * slow_bytes)
    assert process.stdout.readline() == "ready\n"
    while not list((tmp_path / "c").glob("*.part")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=3000)
    assert out == "interrupted\n", err
    assert litter(tmp_path / "c") == []
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_ctrl_c_before_the_handle_returns_cancels_save(slow_state, tmp_path, caplog):
    def ctrl_c(frame, event, arg):
        if event == "c_return" and arg.__name__ == "start_save":
            raise KeyboardInterrupt  # as a signal during this C call would, once it returns

    sys.setprofile(ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    finally:
        sys.setprofile(None)
    slow_state["a"].zero_()
    assert not (tmp_path / "c" / "manifest.json").exists()
    assert litter(tmp_path / "c") == []
    assert caplog.records == []  # a cancelled save is not reported as a failure


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(index**2)


def test_a_data_loader_may_fork_workers_during_a_save(slow_state, tmp_path):
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    for _ in range(3):
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, **workers)
        assert sum(int(batch.sum()) for batch in loader) == sum(i**2 for i in range(64))
    handle.result()
    assert torch.equal(ringstow.load(tmp_path / "c")["a"], slow_state["a"])


def test_a_forked_child_can_save_and_load_by_itself(slow_state, tmp_path):
    ringstow.save({"warm": np.ones(3)}, tmp_path / "warm")  # the parent's engine is running
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)

    def child():
        ringstow.save({"b": np.arange(1000)}, tmp_path / "child")
        assert ringstow.load(tmp_path / "child")["b"].sum() == 499500
        assert ringstow.load(tmp_path / "warm")["warm"].sum() == 3
        with pytest.raises(ringstow.Error, match="forked"):
            handle.result()

    assert in_child(child) == 0
    handle.result()
    assert torch.equal(ringstow.load(tmp_path / "c")["a"], slow_state["a"])


def open_below(root):
    """Return this process's open files in a directory, and its io_uring rings."""
    links = [os.path.realpath(fd.path) for fd in os.scandir("/proc/self/fd")]
    return [link for link in links if str(root) in link or "io_uring" in link]


def has_none(root):
    assert open_below(root) == []


def test_forked_child_closes_the_files_of_a_save(slow_state, tmp_path):
    """Otherwise removed files keep their disk space and lock until the child ends."""
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    while not any(part.stat().st_size for part in (tmp_path / "c").glob("*.part")):
        assert not handle.done()

    assert len(open_below(tmp_path)) >= 2  # the directory, for the lock, and a file
    assert in_child(lambda: has_none(tmp_path)) == 0
    handle.result()
    assert torch.equal(ringstow.load(tmp_path / "c")["a"], slow_state["a"])


def test_forked_child_closes_the_files_of_a_load(slow_state, tmp_path):
    ringstow.save(slow_state, tmp_path / "c", config=SLOW)  # so that loads read small blocks too
    into = {"a": torch.zeros_like(slow_state["a"])}
    load = threading.Thread(
        target=ringstow.load_into, args=(into, tmp_path / "c"), kwargs={"config": SLOW}
    )
    load.start()
    while not into["a"].any():
        assert load.is_alive()

    assert in_child(lambda: has_none(tmp_path)) == 0
    load.join()
    assert torch.equal(into["a"], slow_state["a"])


def test_two_savers_on_one_path_do_not_mix(slow_state, tmp_path):
    code = """
import sys, ringstow
print("ready", flush=True)
sys.stdin.readline()
ringstow.save({"other": 1}, sys.argv[1])
"""
    other = python_start(code, tmp_path / "c", stdin=subprocess.PIPE)
    assert other.stdout.readline() == "ready\n"
    handle = ringstow.save_async(slow_state, tmp_path / "c", config=SLOW)
    handle.wait_staged(0.1)
    _, err = other.communicate("go\n", timeout=3000)
    assert "BusyError" in err
    with pytest.raises(ringstow.BusyError) as caught:
        ringstow.save({"other": 1}, tmp_path / "c")
    assert caught.value.path == str(tmp_path / "c")
    with pytest.raises(ringstow.BusyError, match=r"handle.result\(\)"):  # at the call
        ringstow.save_async({"other": 1}, tmp_path / "c")
    handle.result()
    assert list(ringstow.load(tmp_path / "c")) == ["a"]
    ringstow.save({"other": 1}, tmp_path / "c")
    assert litter(tmp_path / "c") == []


def test_saves_to_different_paths_run_at_once(tmp_path):
    states = [{"a": torch.full((1 << 20,), float(i))} for i in range(6)]
    handles = [ringstow.save_async(s, tmp_path / str(i)) for i, s in enumerate(states)]
    for handle in handles:
        handle.result()
    for i, state in enumerate(states):
        assert_same(ringstow.load(tmp_path / str(i)), state)


def test_other_threads_run_while_a_save_waits(slow_state, tmp_path):
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    try:
        ringstow.save(slow_state, tmp_path / "c", config=SLOW)
        ringstow.load(tmp_path / "c")
        ringstow.verify(tmp_path / "c")
    finally:
        stop.set()
        thread.join()
    took = time.monotonic() - began
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    # On a busy machine a thread may wait for a core for a second, and all of it takes longer.
    assert max(gaps) < max(1.0, took / 10)
