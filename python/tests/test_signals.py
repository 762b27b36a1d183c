"""A signal's handler that saves: what is refused, and the recipes that work."""

from __future__ import annotations

import pytest
from support import python

import ringstow

START = """
import contextlib, os, signal, sys, threading
import numpy as np
import ringstow
path = sys.argv[1]
slow = ringstow.Config(pool_bytes=64 << 10, block_bytes=4 << 10, queue_depth=1, fillers=1)
state = {"a": np.zeros(4 << 20, np.uint8)}

def wait_until_it_writes():
    while not os.path.isdir(path) or not any(n.startswith("rank") for n in os.listdir(path)):
        pass
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
def test_a_handler_is_told_that_its_own_process_is_saving_there(how, tmp_path):
    done = python(START + REFUSED + how, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    for advice in ("this process' own", "handle.cancel()", "set a flag", "another path"):
        assert advice in done.stdout, done.stdout
    assert list(ringstow.load(tmp_path / "c")) == ["a"]


def test_a_handler_may_cancel_the_save_and_save_to_its_path(tmp_path):
    done = python(START + CANCELLED_FIRST + IN_THE_BACKGROUND, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert ringstow.load(tmp_path / "c") == {"last": 1}


@pytest.mark.parametrize("how", [IN_THE_BACKGROUND, AWAITED], ids=["background", "awaited"])
def test_a_handler_may_save_to_another_path(how, tmp_path):
    done = python(START + ELSEWHERE + how, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert ringstow.load(tmp_path / "c-last") == {"last": 1}
    assert list(ringstow.load(tmp_path / "c")) == ["a"]
