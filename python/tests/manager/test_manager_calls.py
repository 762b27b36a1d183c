"""Failures, interrupts, threads, forks and the end of a manager."""

from __future__ import annotations

import logging
import os
import signal
import threading

import fake_native
import pytest
import torch
from support import python

import ringstow
from ringstow import CheckpointManager, _native
from ringstow._manager import _after_save
from ringstow._saving import _jobs


def state(step=1):
    return {"w": torch.full((1000,), float(step)), "step": step}


def block(root, step):
    """Put a file where a step would be saved."""
    root.mkdir(exist_ok=True)
    (root / f"step-{step:08}").write_text("in the way")


@pytest.mark.parametrize("call", ["save", "save_async", "wait", "steps", "restore", "close"])
def test_the_next_call_raises_a_failure_that_nobody_asked_for_once(root, call):
    manager = CheckpointManager(root)
    manager.save(1, state())
    block(root, 2)
    manager.save_async(2, state())
    arguments = {"save": (3, state()), "save_async": (3, state())}.get(call, ())
    with pytest.raises(OSError, match="step-00000002"):
        getattr(manager, call)(*arguments)
    manager.close()
    assert [found.step for found in ringstow.steps(root)] == [1]


def test_a_failure_that_the_caller_has_seen_is_not_raised_again(root):
    with CheckpointManager(root) as manager:
        block(root, 2)
        handle = manager.save_async(2, state())
        with pytest.raises(OSError, match="step-00000002"):
            handle.result()
        manager.save(3, state())


def test_the_end_of_the_block_raises_the_failure(root):
    block(root, 2)
    with pytest.raises(OSError, match="step-00000002"), CheckpointManager(root) as manager:
        manager.save_async(2, state())
    assert not _jobs.unreported


def test_a_failed_save_does_not_mask_what_the_block_raised(root, caplog):
    block(root, 2)

    def train():
        with CheckpointManager(root) as manager:
            manager.save_async(2, state())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("step-00000002" in text for text in said)


def test_a_failed_save_removes_nothing(root):
    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, state())
        block(root, 2)
        for _ in range(2):
            with pytest.raises(OSError, match="step-00000002"):
                manager.save_async(2, state()).result()
        with pytest.raises(OSError, match="step-00000002"):
            manager.save(2, state())
        assert [found.step for found in manager.steps()] == [1]


def test_a_closed_manager_refuses_every_call(root):
    manager = CheckpointManager(root)
    with manager:
        manager.save_async(1, state())
    manager.close()
    calls = [
        lambda: manager.save(2, state()),
        lambda: manager.save_async(2, state()),
        manager.wait,
        manager.steps,
        manager.latest,
        lambda: manager.best("loss", "min"),
        manager.restore,
    ]
    for call in calls:
        with pytest.raises(ringstow.InvalidStateError, match="is closed"):
            call()
    assert "closed" in repr(manager)


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_removal_holds_up_neither_the_call_nor_the_handle(root, monkeypatch, removal, ends_at_once):
    if ends_at_once:  # before the manager can follow the save
        start = ringstow._manager._one_process.save_async

        def started(*args, **options):
            handle = start(*args, **options)
            handle.result()
            return handle

        monkeypatch.setattr(ringstow._manager._one_process, "save_async", started)
    removing, may_remove = removal
    with CheckpointManager(root, keep=1) as manager:
        manager.save_async(1, state()).result()  # returns while the removal waits
        assert removing.wait(60)
        assert manager.retention_report is None
        may_remove.set()
        manager.wait()
        assert manager.retention_report is not None


def test_a_load_never_meets_the_removal(root, monkeypatch):
    """The next call begins only when the removal after the save before has ended."""
    order = []

    def noted(owner, name):
        call = getattr(owner, name)

        def wrapper(*args, **options):
            order.append(f"{name} begins")
            done = call(*args, **options)
            order.append(f"{name} ends")
            return done

        monkeypatch.setattr(owner, name, wrapper)

    noted(_after_save, "cleared")
    noted(ringstow._manager._one_process, "loaded")
    with CheckpointManager(root, keep=1) as manager:
        manager.save_async(1, state())
        assert manager.restore().step == 1
        manager.save_async(2, state())
        assert manager.restore().step == 2
    removal, load = ([f"{name} begins", f"{name} ends"] for name in ("cleared", "loaded"))
    assert order == [*removal, *load, *removal, *removal, *load]  # a second save begins with one


def test_ctrl_c_ends_the_wait_and_not_the_save(root, monkeypatch):
    monkeypatch.setattr(_native, "start_save", fake_native.start_save)
    gate = fake_native.Gate(end=False)
    monkeypatch.setattr(fake_native, "gate", gate)
    manager = CheckpointManager(root)
    handle = manager.save_async(1, state())

    class Interrupted:
        """The event that the manager waits for: Ctrl-C comes during the wait."""

        def wait(self, timeout=None):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the wait went on")

    saving = manager._calls.saving
    manager._calls.saving = saving._replace(is_over=Interrupted())
    for call in manager.wait, manager.close:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not handle.done()
    manager._calls.saving = manager._calls.saving._replace(is_over=saving.is_over)
    gate.open()
    manager.close()
    assert handle.done()
    assert handle.exception() is None


def test_a_signal_handler_within_a_call_is_refused(root, monkeypatch):
    """It would save or load in the middle of another save or load."""
    refused = []

    def handler(*_):
        try:
            manager.save(2, state())
        except ringstow.BusyError as error:
            refused.append(str(error))

    real = _after_save.cleared

    def retain(*args, **options):
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **options)

    monkeypatch.setattr(_after_save, "cleared", retain)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with CheckpointManager(root, keep=1) as manager:
            manager.save(1, state())
            assert "set a flag" in refused[0]
            assert [found.step for found in manager.steps()] == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_thread_waits_for_the_call_of_the_first(root, removal):
    removing, may_remove = removal
    found = []
    with CheckpointManager(root, keep=1) as manager:
        first = threading.Thread(target=manager.save, args=(1, state()))
        first.start()
        assert removing.wait(60)
        second = threading.Thread(target=lambda: found.append(manager.restore().step))
        second.start()
        second.join(0.2)
        assert not found  # the first one's call has not returned
        may_remove.set()
        first.join()
        second.join()
    assert found == [1]


def test_a_forked_child_needs_a_manager_of_its_own(root):
    manager = CheckpointManager(root)
    manager.save_async(1, state())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with manager:  # whose end does nothing here
                for call in manager.wait, manager.close, lambda: manager.save(2, state()):
                    with pytest.raises(ringstow.Error, match="make a CheckpointManager here"):
                        call()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    manager.close()
    assert [found.step for found in ringstow.steps(root)] == [1]


def test_exit_without_close_waits_for_save_and_removal(root):
    code = """
import sys, ringstow
manager = ringstow.CheckpointManager(sys.argv[1], keep=1)
for step in (1, 2, 3):
    manager.save_async(step, {"w": bytes(1 << 20)})
"""
    done = python(code, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert [found.step for found in ringstow.steps(root)] == [3]


def test_exit_without_close_fails_after_a_failed_save(root):
    block(root, 2)
    code = """
import sys, ringstow
manager = ringstow.CheckpointManager(sys.argv[1])
manager.save_async(2, {"w": 1})
"""
    done = python(code, root)
    assert done.returncode == 1
    assert "step-00000002" in done.stderr


def test_ranks_that_come_after_the_manager_are_refused(root, monkeypatch):
    from ringstow._ranks import _concurrent_saves

    manager = CheckpointManager(root)
    monkeypatch.setattr(_concurrent_saves, "ranks", lambda: (1, 4))
    with pytest.raises(ringstow.InvalidStateError, match="rank 1 of 4.*after init_process_group"):
        manager.save(1, state())
    monkeypatch.undo()
    manager.close()


def test_bad_calls_are_refused_before_anything_is_written(root):
    with CheckpointManager(root) as manager:
        for step, error in ((None, TypeError), (-1, ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                manager.save(step, state())
        with pytest.raises(ringstow.InvalidStateError):
            manager.save(1, state(), metrics={"loss": "low"})
    assert not root.exists()


def test_start_without_a_step_warns_of_a_directory_that_may_be_mistyped(tmp_path, caplog):
    empty, missing = tmp_path / "empty", tmp_path / "mistyped"
    empty.mkdir()
    for root, said in ((empty, ""), (missing, " (no such directory)")):
        with ringstow.CheckpointManager(root) as manager:
            assert manager.restore() is None
        assert caplog.messages == [f"nothing in {root}{said}: starting anew"]
        assert caplog.records[0].levelno == logging.WARNING  # shown where logging is not set up
        caplog.clear()
    with ringstow.CheckpointManager(empty, tiers=[missing]) as manager:
        assert manager.restore() is None
        assert f"nothing in {empty} and {missing}: starting anew" in caplog.messages
        manager.save(1, {"a": 1})
        caplog.clear()
        assert manager.restore().step == 1
        with pytest.raises(ringstow.NoCheckpointError):
            manager.restore(2)
    assert "starting anew" not in caplog.text


def test_an_error_shows_only_the_beginning_of_a_state_in_the_place_of_a_number(root):
    state = {"w": list(range(10_000))}
    with CheckpointManager(root) as manager:
        for wrong in (
            lambda: manager.restore(state),
            lambda: manager.save(state, 1),
            lambda: manager.save(1, {}, metrics=[state]),
            lambda: CheckpointManager(root, keep=state),
        ):
            with pytest.raises((TypeError, ringstow.InvalidStateError)) as refused:
                wrong()
            assert "not {'w': [0, 1," in str(refused.value).replace("[{", "{")
            assert len(str(refused.value)) < 250
