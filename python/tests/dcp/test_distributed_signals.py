"""A signal handler that saves or loads while its thread is in such a call gets BusyError."""

from __future__ import annotations

import ast
import pathlib
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import ringstow
from ringstow import distributed
from ringstow._core._call_lock import CallLock

PACKAGE = pathlib.Path(ringstow.__file__).parent
MOMENTS = ["making the group", "saving", "loading"]


class Interrupts:
    """A part of a state that gets a signal when it is saved and when it is loaded."""

    def state_dict(self):
        signal.raise_signal(signal.SIGUSR2)
        return {"x": 1}

    def load_state_dict(self, state):
        signal.raise_signal(signal.SIGUSR2)


def interrupted(rank, path, moment):
    """Let a handler save and load at a moment of a call; return what it gets."""
    state = {"w": torch.arange(10.0)}
    if moment != "making the group":
        distributed.save(state, path / "first")
    caught = []

    def handler(*_):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # once
        calls = {
            "save": lambda: distributed.save(state, path / "other"),
            "save_async": lambda: distributed.save_async(state, path / "other"),
            "load": lambda: distributed.load(path / "first"),
            "load_into": lambda: distributed.load_into(dict(state), path / "first"),
        }
        for name, call in calls.items():
            try:
                call()
            except ringstow.BusyError as error:
                caught.append((name, "let the handler set a flag" in str(error)))

    before = signal.signal(signal.SIGUSR2, handler)
    broadcast = dist.broadcast_object_list
    try:
        if moment == "making the group":

            def interrupted(*args, **kwargs):
                signal.raise_signal(signal.SIGUSR2)
                return broadcast(*args, **kwargs)

            group = dist.new_group([0])  # one that no call has had
            dist.broadcast_object_list = interrupted
            distributed.save(state, path / "x", group=group)
        elif moment == "saving":
            distributed.save({**state, "part": Interrupts()}, path / "x")
            distributed.save_async(state, path / "y").result()
            distributed.save(state, path / "y")
        else:
            distributed.save({**state, "part": {"x": 1}}, path / "x")
            distributed.load_into({**state, "part": Interrupts()}, path / "x")
    finally:
        dist.broadcast_object_list = broadcast
        signal.signal(signal.SIGUSR2, before)
    assert distributed.load(path / "x")["w"].tolist() == state["w"].tolist()
    return caught


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_handler_gets_an_error_and_never_waits(ranks, tmp_path, moment):
    (caught,) = ranks(1).run(interrupted, tmp_path, moment, timeout=100)
    assert caught == [(name, True) for name in ("save", "save_async", "load", "load_into")]


def test_another_thread_ends_what_one_has_begun():
    lock = CallLock("a call")
    lock.acquire()
    with pytest.raises(ringstow.BusyError, match="a call was called within another such call"):
        lock.acquire()
    lock.hand_over()
    threading.Thread(target=lock.release).start()
    with lock.held(), pytest.raises(ringstow.BusyError):
        lock.acquire()
    with lock.held():
        pass


def test_no_lock_can_be_waited_for_by_the_handler_that_interrupts_its_holder():
    # `_done_callbacks` never waits for its lock, and CallLock raises BusyError.
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("threading.Lock", "Lock", "threading.Semaphore")
    }
    assert found == {"_reports/_done_callbacks.py", "_core/_call_lock.py"}, (
        "take RLock, or CallLock"
    )
