"""A manager saves when its policies say so, and stops at a signal with the last step durable."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
from support import python

import ringstow
from ringstow import CheckpointManager, Continuous, EverySteps, InvalidStateError, OnSignal

# One that pytest does not use.
ONE = signal.SIGUSR2


def send():
    os.kill(os.getpid(), ONE)


@pytest.fixture
def noted():
    """Return what a handler of the program's own has noted."""
    seen = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(ONE, handler)
    yield seen
    assert signal.getsignal(ONE) is handler
    signal.signal(ONE, before)


def train(manager, steps, at=-1):
    """Train; return the last step."""
    for step in steps:
        if step == at:
            send()
        if manager.should_save(step):
            manager.save_async(step, {"w": step})
        if manager.stopping:
            break
    return step


def test_steps_are_saved_when_the_policy_says_so(root):
    with CheckpointManager(root, when=EverySteps(3)) as manager:
        assert train(manager, range(10)) == 9
        assert not manager.stopping
        assert [found.step for found in manager.steps()] == [3, 6, 9]


def test_continuous_saves_after_each_that_is_durable(root):
    with CheckpointManager(root, when=Continuous()) as manager:
        assert manager.should_save(1)
        handle = manager.save_async(1, {"w": 1})
        handle.result()
        assert manager.should_save(2)
        manager.save(2, {"w": 2})
        assert manager.should_save(3)


def test_signal_is_saved_at_the_next_step_and_the_loop_ends(root, noted, caplog):
    with CheckpointManager(root, when=EverySteps(100) | OnSignal(ONE, grace="1h")) as manager:
        assert train(manager, range(50), at=7) == 7
        assert noted == [ONE]
        assert [found.step for found in manager.steps()] == [7]
    assert f"{ONE.name} ends the training" in caplog.text
    assert "should_save asks for it: 36" in caplog.text  # 3600 s


def test_save_that_ends_a_training_is_durable_or_raises_at_the_call(root, noted):
    with CheckpointManager(root, when=OnSignal(ONE)) as manager:
        send()
        assert manager.should_save(1)
        assert manager.stopping
        assert manager.save_async(1, {"w": 1}, on_busy="skip").done()
        (root / "step-00000002").write_text("in the way")
        with pytest.raises(OSError, match="step-00000002"):
            manager.save_async(2, {"w": 2})
        assert manager.latest().step == 1


def test_grace_that_is_too_short_saves_nothing_and_says_so(root, noted, caplog):
    # However fast the machine is, half a megabyte takes half a second.
    slow = ringstow.Config(write_rate="1M", block_bytes=4 << 10, pool_bytes="2M")
    state = {"w": torch.zeros(1 << 19, dtype=torch.uint8)}
    with CheckpointManager(root, when=OnSignal(ONE, grace="200ms"), config=slow) as manager:
        manager.save(1, state)
        send()
        assert not manager.should_save(2)
        assert manager.stopping
    assert "it is not saved: " in caplog.text
    assert "The earlier checkpoint stays" in caplog.text
    assert ringstow.verify(ringstow.latest(root).path).ok


def test_the_same_notice_may_come_twice(root, noted):
    with CheckpointManager(root, when=OnSignal(ONE)) as manager:
        send()
        send()
        assert train(manager, range(5)) == 0
    assert noted == [ONE, ONE]


def test_handler_is_restored_by_close_and_after_an_exception(root, noted):
    def fail():
        with CheckpointManager(root, when=OnSignal(ONE)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    send()
    manager = CheckpointManager(root, when=OnSignal(ONE))
    manager.close()
    send()
    assert noted == [ONE, ONE]
    with pytest.raises(InvalidStateError, match="is closed"):
        manager.should_save(1)


def test_two_managers_both_hear_a_signal(tmp_path, noted):
    one = CheckpointManager(tmp_path / "a", when=OnSignal(ONE))
    other = CheckpointManager(tmp_path / "b", when=OnSignal(ONE))
    send()
    assert [manager.should_save(1) for manager in (one, other)] == [True, True]
    other.close()
    one.close()
    assert noted == [ONE]


def test_manager_that_cannot_be_made_leaves_the_handler(tmp_path, noted):
    with pytest.raises(InvalidStateError):
        CheckpointManager(tmp_path, nodes=ringstow.Nodes(), when=OnSignal(ONE))


def test_manager_that_is_dropped_no_longer_handles_the_signal(root, noted):
    manager = CheckpointManager(root, when=OnSignal(ONE))
    handler = signal.getsignal(ONE)
    del manager
    gc.collect()
    for _ in range(3):
        send()
    assert noted == [ONE] * 3
    assert signal.getsignal(ONE) is handler
    handler.restore()


@pytest.mark.parametrize("how", ["dropped", "in order"])
def test_manager_after_one_that_has_ended_saves_at_a_signal(tmp_path, how):
    """As a program without a handler of its own: the signal must not end it."""
    before = signal.signal(ONE, signal.SIG_DFL)
    try:
        first = CheckpointManager(tmp_path / "a", when=OnSignal(ONE))
        if how == "in order":
            second = CheckpointManager(tmp_path / "b", when=OnSignal(ONE))
            first.close()
            second.close()
            assert signal.getsignal(ONE) == signal.SIG_DFL
        del first
        gc.collect()
        with CheckpointManager(tmp_path / "c", when=OnSignal(ONE)) as manager:
            assert train(manager, range(5), at=2) == 2
            assert [step.step for step in manager.steps()] == [2]
        assert signal.getsignal(ONE) == signal.SIG_DFL
    finally:
        signal.signal(ONE, before)


def test_signal_that_nobody_asks_about_is_told(root, noted, caplog):
    with CheckpointManager(root, when=OnSignal(ONE)) as manager:
        manager.should_save(1)
        send()
        assert not manager.stopping
    assert "SIGUSR2 came, and should_save was not called after it" in caplog.text


def test_step_that_was_to_be_saved_and_is_not_is_told_once(root, caplog):
    with CheckpointManager(root, when=EverySteps(1)) as manager:
        assert manager.should_save(1)
        manager.save_async(1, {"w": 1})
        assert manager.should_save(2)
        assert "no save followed" not in caplog.text
        assert manager.should_save(3)
        assert manager.should_save(4)
    assert caplog.text.count("should_save(2) was true, and no save followed") == 1
    assert caplog.text.count("no save followed") == 1


@pytest.mark.parametrize("step", ["5", 5.0, None])
def test_step_that_is_no_integer_is_refused_and_forgotten(root, step):
    with CheckpointManager(root, when=EverySteps(5)) as manager:
        with pytest.raises(TypeError, match="step is an integer"):
            manager.should_save(step)
        assert manager.should_save(5)
        manager.save(5, {"w": 1})


def test_another_thread_cannot_handle_signals_and_is_told_so(root):
    said = []

    def make():
        try:
            CheckpointManager(root, when=OnSignal())
        except InvalidStateError as error:
            said.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "OnSignal needs the main thread" in said[0]
    assert "use Every or Before" in said[0]


PROGRAM = """
import os, signal, sys
import ringstow
from ringstow._manager import _signals

manager = ringstow.CheckpointManager(sys.argv[1], when=ringstow.OnSignal())
manager.save(1, {"w": 1})
"""

SECOND = """
_signals.SAME_NOTICE_S = -1.0
print("first", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
assert manager.should_save(2)
handle = manager._side.save_async({"w": 2}, manager.root + "/step-00000002", 2, None)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
"""

FORKED = """
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
assert not manager.should_save(2)
manager.close()
"""

INTERRUPTED = """
manager.close()
with ringstow.CheckpointManager(sys.argv[1], when=ringstow.OnSignal(signal.SIGINT)) as manager:
    os.kill(os.getpid(), signal.SIGINT)
    assert manager.should_save(2) and manager.stopping
    _signals.SAME_NOTICE_S = -1.0
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_the_second_signal_ends_the_process_at_once_and_the_earlier_step_stays(root):
    done = python(PROGRAM + SECOND, root)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "first\n"), done.stderr
    assert ringstow.latest(root).step in (1, 2)
    assert ringstow.load(root / "step-00000001") == {"w": 1}


def test_forked_child_ends_by_the_signal_as_it_would_without_a_manager(root):
    done = python(PROGRAM + FORKED, root)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_may_be_the_signal(root):
    done = python(PROGRAM + INTERRUPTED, root)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
