"""What a background save cost training: the call, and the waits for it."""

from __future__ import annotations

import os
import threading
import types

import pytest
import torch
from held_save import LARGE

import ringstow
from ringstow._reports import _blocked_time
from ringstow._saving import _guard


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still unless a test changes ``now``."""
    one = types.SimpleNamespace(now=100.0)
    stopped = types.SimpleNamespace(perf_counter=lambda: one.now)
    monkeypatch.setattr(_blocked_time, "time", stopped)
    return one


@pytest.fixture
def slow_wait(clock, held, monkeypatch):
    """Make each wait of an optimizer step take 5 s, after which the save goes on."""
    wait = _guard.Hold.wait

    def hold_wait(hold):
        clock.now += 5
        held.release()
        wait(hold)

    monkeypatch.setattr(_guard.Hold, "wait", hold_wait)


def step():
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight], 0.1).step()


def in_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [lambda act: act(), in_a_thread], ids=["here", "in a thread"])
def test_step_that_waits_counts(run, save, slow_wait):
    handle = save({"w": torch.zeros(LARGE)})
    run(step)
    assert handle.result().blocked_seconds == 5


def test_step_that_need_not_wait_costs_nothing(save, held, clock):
    handle = save({"w": torch.zeros(LARGE)})
    held.release()
    handle.wait_staged()
    step()
    assert handle.result().blocked_seconds == 0


def test_call_counts(held, clock, tmp_path, monkeypatch):
    stage = _guard.stage

    def slow(*args):
        clock.now += 3
        return stage(*args)

    monkeypatch.setattr(_guard, "stage", slow)
    held.release()
    handle = ringstow.save_async({"w": torch.zeros(LARGE)}, tmp_path / "c")
    assert handle.result().blocked_seconds == 3
    assert ringstow.save({"w": torch.zeros(LARGE)}, tmp_path / "c").blocked_seconds == 3


@pytest.mark.parametrize("wait", ["wait_staged", "result"])
def test_waits_of_the_caller_count(wait, save, held, clock):
    handle = save({"w": torch.zeros(LARGE)})
    main = threading.get_ident()

    def later():
        while handle._hold.waited._threads[main][1] is None:  # until the caller waits
            os.sched_yield()
        clock.now += 7
        held.release()

    thread = threading.Thread(target=later)
    thread.start()
    getattr(handle, wait)()
    thread.join()
    assert handle.result().blocked_seconds == 7


def test_result_in_a_thread_that_trains_nothing_does_not_count(save, held, clock):
    handle = save({"w": torch.zeros(LARGE)})
    thread = threading.Thread(target=handle.result)
    thread.start()
    clock.now += 7
    held.release()
    thread.join()
    assert handle.result().blocked_seconds == 0


def test_waits_of_several_threads_do_not_add_up(clock):
    waited = _blocked_time.Waited()
    both_wait, go_on = threading.Barrier(3), threading.Event()

    def wait():
        with waited.here():
            both_wait.wait()
            go_on.wait()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    both_wait.wait()
    clock.now += 2
    assert waited.seconds() == 2
    go_on.set()
    for thread in threads:
        thread.join()
    clock.now += 2
    assert waited.seconds() == 2


def test_wait_within_a_wait_counts_once(clock):
    waited = _blocked_time.Waited()
    for _ in range(2):
        with waited.here(), waited.here():
            clock.now += 1
    assert waited.seconds() == 2
