"""Python's garbage collector rests during loads and saves, and is as others want it afterwards."""

import gc
import sys
import threading

import pytest
from support import in_child

from ringstow._core._gc_pause import collector_paused


@pytest.fixture(autouse=True)
def thresholds():
    before, was_on = gc.get_threshold(), gc.isenabled()
    yield before
    gc.set_threshold(*before)
    gc.enable() if was_on else gc.disable()


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def runs_while(make):
    """Return how often the collector starts by itself during a call."""
    runs = []
    note = lambda phase, _: runs.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        kept = make()
    finally:
        gc.callbacks.remove(note)
    assert kept
    return len(runs)


def many():
    return [[] for _ in range(100_000)]


def test_it_does_not_start_by_itself(thresholds):
    gc.enable()
    assert runs_while(many) > 0
    with collector_paused():
        assert runs_while(many) == 0
    assert gc.get_threshold() == thresholds
    assert runs_while(many) > 0


def test_what_another_thread_switches_off_meanwhile_stays_off(thresholds):
    gc.enable()
    with collector_paused():
        in_thread(gc.disable)
    assert not gc.isenabled()
    assert gc.get_threshold() == thresholds
    with collector_paused():
        in_thread(gc.enable)
    assert gc.isenabled()


def test_what_another_thread_asks_for_meanwhile_stays():
    with collector_paused():
        in_thread(lambda: gc.set_threshold(5, 6, 7))
    assert gc.get_threshold() == (5, 6, 7)


def test_it_rests_until_the_last_of_several_has_ended(thresholds):
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert runs_while(many) == 0
    with collector_paused():
        pass
    assert runs_while(many) == 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


def test_ctrl_c_at_any_moment_leaves_it_as_it_was(thresholds):
    for moment in range(1000):
        calls = 0

        def interrupt(frame, event, called, moment=moment):
            nonlocal calls
            if event in ("call", "c_call") and called is not sys.setprofile:
                calls += 1
                if calls == moment:
                    raise KeyboardInterrupt

        ended = False
        sys.setprofile(interrupt)
        try:
            with collector_paused():
                len(())
            ended = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert gc.get_threshold() == thresholds
        if ended and calls < moment:
            break
    assert moment > 5
    other = threading.Thread(target=lambda: collector_paused().__enter__(), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive(), "it waits for what the interrupted thread holds"


def test_a_forked_child_has_it_back(thresholds):
    def child():
        assert gc.get_threshold() == thresholds

    with collector_paused():
        assert in_child(child) == 0
