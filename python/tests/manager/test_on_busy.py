"""A save with ``on_busy="skip"`` is left out while the one before is in progress, and says so."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import ringstow
from ringstow import CheckpointManager
from ringstow._manager import _calls
from ringstow._reports import _done_callbacks


@pytest.fixture
def gate(removal):
    """Return an event: the last part of a save, the removal of old steps, may go on."""
    return removal[1]


def state(step):
    return {"w": np.full(1000, step)}


def numbers(root):
    return [step.step for step in ringstow.steps(root)]


def test_a_step_is_left_out_while_the_one_before_is_saved(root, gate, caplog):
    with CheckpointManager(root) as manager:
        first = manager.save_async(1, state(1), on_busy="skip")
        second = manager.save_async(2, state(2), metrics={"loss": 0.5}, on_busy="skip")
        assert (first.skipped, second.skipped) == (False, True)
        assert second.done()
        assert second.wait_staged()
        report = second.result()
        assert (report.skipped, report.written_bytes, report.step) == (True, 0, 2)
        assert str(report).endswith("skipped, since the previous save was in progress")
        assert manager.save_async(2, state(2), on_busy="skip").skipped  # without another warning
        gate.set()
        manager.wait()
        third = manager.save_async(3, state(3), on_busy="skip")
        assert not third.skipped
        assert not third.result().skipped
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert f"step 2 is not saved: the save to {root}/step-00000001 is still in progress" in said[0]
    assert numbers(root) == [1, 3]


def test_the_handle_of_a_skip_does_what_others_do(root, gate):
    with CheckpointManager(root, tiers=[root.parent / "there"]) as manager:
        first = manager.save_async(1, state(1), on_busy="skip")
        handle = manager.save_async(2, state(2), on_busy="skip")
        lacking = [name for name in dir(first) if not name.startswith("_")]
        assert [name for name in lacking if not hasattr(handle, name)] == []

        async def awaited():
            return await handle

        assert asyncio.run(awaited()).skipped
        assert handle.progress().total == 0
        assert not handle.wait_promoted()
        assert not handle.promoted()
        assert not handle.cancel()
        gate.set()


def test_a_skip_is_told_to_those_who_ask(root, gate):
    seen = []
    with ringstow.on_done(seen.append, kinds=["save", "skip"]), CheckpointManager(root) as manager:
        manager.save_async(1, state(1), on_busy="skip")
        manager.save_async(2, state(2), metrics={"loss": 0.5}, on_busy="skip")
        gate.set()
    _done_callbacks.flush()
    skipped = next(one for one in seen if one.kind == "skip")
    told = skipped.step, skipped.metrics, skipped.path
    assert told == (2, {"loss": 0.5}, f"{root}/step-00000002")


def test_a_step_is_saved_if_the_one_before_ends_while_other_ranks_are_awaited(
    root, gate, monkeypatch
):
    with CheckpointManager(root) as manager:
        manager.save_async(1, state(1), on_busy="skip")
        meet, over = manager._side.meet, manager._calls.saving.is_over

        def meets_late(call, failure, said):
            gate.set()
            over.wait()
            return meet(call, failure, said)

        monkeypatch.setattr(manager._side, "meet", meets_late)
        assert not manager.save_async(2, state(2), on_busy="skip").skipped
    assert numbers(root) == [1, 2]


@pytest.mark.parametrize("is_last", [True, False])
def test_the_end_says_if_the_last_step_was_left_out(root, gate, caplog, is_last):
    with CheckpointManager(root) as manager:
        manager.save_async(1, state(1), on_busy="skip")
        assert manager.save_async(2, state(2), on_busy="skip").skipped
        gate.set()
        if not is_last:
            manager.save(3, state(3))
    said = [text for text in caplog.messages if text.startswith("the last step of")]
    assert [f"{root}, 2, is not saved" in text for text in said] == [True] * is_last


def test_training_waited_for_the_save_before(root, monkeypatch):
    """The wait within a manager's call counts, too."""
    ended = _calls.Calls._ended

    def waits(self):
        time.sleep(0.2)
        return ended(self)

    with CheckpointManager(root) as manager:
        monkeypatch.setattr(_calls.Calls, "_ended", waits)
        assert manager.save_async(1, state(1)).result().blocked_seconds >= 0.2
        assert manager.save(2, state(2)).blocked_seconds >= 0.2
        monkeypatch.undo()


@pytest.mark.parametrize("how", ["save", "every"])
def test_a_save_and_a_step_that_stays_wait(root, gate, how):
    with CheckpointManager(root, keep=ringstow.Retention(last=9, every=10)) as manager:
        manager.save_async(1, state(1), on_busy="skip")
        threading.Timer(0.2, gate.set).start()
        if how == "save":
            manager.save(2, state(2))
        else:
            assert not manager.save_async(10, state(10), on_busy="skip").skipped
    assert numbers(root) == ([1, 2] if how == "save" else [1, 10])


def test_a_step_takes_the_place_of_a_cancelled_one(root):
    never = ringstow.Config(write_rate=10, block_bytes=1 << 20)  # not within a day
    large = {"w": np.ones(8 << 20, np.uint8)}
    with CheckpointManager(root, config=never) as manager:
        first = manager.save_async(1, large, on_busy="skip")
        assert manager.save_async(2, large, on_busy="skip").skipped
        first.cancel()
        third = manager.save_async(3, large, on_busy="skip")
        assert not third.skipped
        third.cancel()


def test_a_failure_is_raised_and_not_skipped(root):
    root.mkdir()
    with CheckpointManager(root) as manager:
        (root / "step-00000002").write_text("in the way")
        manager.save_async(2, state(2), on_busy="skip")
        manager._calls.saving.is_over.wait()
        with pytest.raises(OSError, match="step-00000002"):
            manager.save_async(3, state(3), on_busy="skip")
        manager.save(3, state(3))
    assert numbers(root) == [3]


def test_bad_metrics_of_a_step_that_is_left_out_are_refused_as_ever(root, gate):
    with CheckpointManager(root) as manager:
        manager.save_async(1, state(1), on_busy="skip")
        with pytest.raises(ringstow.InvalidStateError):
            manager.save_async(2, state(2), metrics={"loss": "low"}, on_busy="skip")
        gate.set()


def test_an_unknown_word_is_refused(root):
    with pytest.raises(ValueError, match='on_busy is "wait" or "skip", not \'drop\''):
        CheckpointManager(root).save_async(1, state(1), on_busy="drop")
