"""Saves in signal handlers: which are refused, and which work."""

import threading

import pytest
from support import python

import ringstow

START = """
import contextlib, os, signal, sys, threading, time
import numpy as np
import ringstow
path, seconds = sys.argv[1], float(sys.argv[2])
state = {"a": np.zeros(1 << 20, np.uint8)}
slow = ringstow.Config(pool_bytes="2M", block_bytes=4 << 10, write_rate=int((1 << 20) / seconds))

def wait_until_it_writes():
    while not os.path.isdir(path) or not any(n.startswith("rank") for n in os.listdir(path)):
        time.sleep(0.001)
"""

REFUSED = """
def handler(signum, frame):
    try:
        ringstow.save({"last": 1}, path)
    except ringstow.BusyError as error:
        print(error)
signal.signal(signal.SIGTERM, handler)
"""

IN_THE_BACKGROUND = """
handle = ringstow.save_async(state, path, config=slow)
wait_until_it_writes()
os.kill(os.getpid(), signal.SIGTERM)
"""

AWAITED = """
def when_it_saves():
    wait_until_it_writes()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=when_it_saves).start()
ringstow.save(state, path, config=slow)
"""

CANCELLED_FIRST = """
def handler(signum, frame):
    handle.cancel()
    with contextlib.suppress(ringstow.SaveCancelledError):
        handle.result()
    ringstow.save({"last": 1}, path)
signal.signal(signal.SIGTERM, handler)
"""

ELSEWHERE = """
def handler(signum, frame):
    ringstow.save({"last": 1}, path + "-last")
signal.signal(signal.SIGTERM, handler)
"""


@pytest.mark.parametrize("how", [IN_THE_BACKGROUND, AWAITED], ids=["background", "awaited"])
def test_signal_handler_is_refused_during_a_save(how, tmp_path):
    for seconds in (1, 4, 16):  # until the signal comes during the save
        done = python(START + REFUSED + how, tmp_path / "c", seconds, check=True)
        if done.stdout:
            break
        ringstow.remove(tmp_path / "c")
    for advice in ("this process' own", "handle.cancel()", "set a flag", "another path"):
        assert advice in done.stdout, done.stdout
    assert list(ringstow.load(tmp_path / "c")) == ["a"]


def test_a_handler_may_cancel_the_save_and_save_to_its_path(tmp_path):
    python(START + CANCELLED_FIRST + IN_THE_BACKGROUND, tmp_path / "c", 1, check=True)
    assert ringstow.load(tmp_path / "c") == {"last": 1}


@pytest.mark.parametrize("how", [IN_THE_BACKGROUND, AWAITED], ids=["background", "awaited"])
def test_a_handler_may_save_to_another_path(how, tmp_path):
    python(START + ELSEWHERE + how, tmp_path / "c", 1, check=True)
    assert ringstow.load(tmp_path / "c-last") == {"last": 1}
    assert list(ringstow.load(tmp_path / "c")) == ["a"]


WARNS = """
import logging

class Handler(logging.Handler):
    def emit(self, record):  # holds the handler's lock
        print(record.getMessage())
        if record.getMessage() == "interrupt me":
            os.kill(os.getpid(), signal.SIGTERM)

def save(signum, frame):
    handle = ringstow.save_async({"a": 1}, path + "-first", config=cannot_trace)
    ringstow.save({"a": 1}, path, config=cannot_trace)
    handle.result()

cannot_trace = ringstow.Config(trace=path + "/no/such/directory/trace.json")
logging.getLogger().addHandler(Handler())
signal.signal(signal.SIGTERM, save)
logging.warning("interrupt me")
"""


def test_signal_handler_may_save_during_logging(tmp_path):
    """The thread that waits for the save logs the warnings; it already holds the lock."""
    done = python(START + WARNS, tmp_path / "c", 1, limit=30, check=True)
    assert done.stdout.count("the trace could not be written") == 2
    assert ringstow.load(tmp_path / "c") == {"a": 1}


STARTS_NO_THREAD = """
def save(signum, frame):
    ringstow.save({"a": 1}, path)

signal.signal(signal.SIGTERM, save)
with threading._shutdown_locks_lock:  # as while a thread starts
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not hasattr(threading, "_shutdown_locks_lock"), reason="a lock of Python 3.11")
def test_signal_handler_may_save_during_a_thread_start(tmp_path):
    python(START + STARTS_NO_THREAD, tmp_path / "c", 1, limit=30, check=True)
    assert ringstow.load(tmp_path / "c") == {"a": 1}
