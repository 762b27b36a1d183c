"""Older steps lose the parts that they need no more, and keep the rest."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import ringstow
from ringstow._manager import _after_save


def state(step):
    weights = np.full(5000, step, np.float32)
    return {"model": {"w": weights}, "optimizer": {"m": weights * 2, "step": step}}


def save_all(manager, steps):
    for step in steps:
        manager.save_async(step, state(step))
    manager.wait()


def whole(root):
    return [step.step for step in ringstow.steps(root) if not step.dropped]


def test_older_steps_lose_the_optimizer_and_keep_the_model(tmp_path):
    rules = ringstow.Retention(last=4, slim_after=2)
    with ringstow.CheckpointManager(tmp_path, keep=rules) as manager:
        save_all(manager, range(1, 7))
    assert [step.step for step in ringstow.steps(tmp_path)] == [3, 4, 5, 6]
    assert whole(tmp_path) == [5, 6]
    with ringstow.CheckpointManager(tmp_path) as manager:
        old, newest = manager.restore(3), manager.restore()
    assert list(old.state) == ["model"]
    assert (old.state["model"]["w"] == 3).all()
    assert newest.state["optimizer"]["step"] == 6


def test_steps_that_were_not_saved_apart_stay_whole_with_one_warning(tmp_path, caplog):
    with ringstow.CheckpointManager(tmp_path) as manager:
        save_all(manager, [1])
    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        save_all(manager, [2, 3, 4])
    assert whole(tmp_path) == [1, 4]
    assert caplog.text.count("stays as it is") == 1


def test_step_that_is_saved_again_with_the_part_apart_is_slimmed(tmp_path):
    with ringstow.CheckpointManager(tmp_path) as manager:
        save_all(manager, [1, 2, 3, 4])
    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        save_all(manager, [2, 3, 4, 5])  # the run went back to step 1
    assert whole(tmp_path) == [1, 5]


def test_state_without_the_part_is_refused(tmp_path):
    rules = ringstow.Retention(slim_after=1, drop=["ema"])
    with ringstow.CheckpointManager(tmp_path, keep=rules) as manager:
        with pytest.raises(ringstow.InvalidStateError, match="nothing named 'ema'"):
            manager.save(1, state(1))
        assert manager.latest() is None


def test_slimming_that_fails_fails_no_save_and_is_tried_again(tmp_path, monkeypatch, caplog):
    real = _after_save.cleared

    def full(*given):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            return real(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        with monkeypatch.context() as broken:
            broken.setattr(_after_save, "cleared", full)
            save_all(manager, [1, 2])
            assert isinstance(manager.retention_error, OSError)
        assert "step-00000001 was not slimmed: " in caplog.text
        assert "The next save tries again" in caplog.text
        assert whole(tmp_path) == [1, 2]
        save_all(manager, [3])
    assert whole(tmp_path) == [3]


@pytest.mark.parametrize("why", ["a kill", "a failure"])
def test_files_that_a_slimming_left_go_after_the_next_save(tmp_path, monkeypatch, why):
    step = tmp_path / "step-00000001"
    ringstow.save(state(1), step, step=1, droppable=["optimizer"])
    before = {file: file.read_bytes() for file in step.glob("*.safetensors")}
    ringstow.slim(step, ["optimizer"])
    left = [file for file in before if not file.exists()]
    assert left
    for file in left:
        file.write_bytes(before[file])
    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        if why == "a failure":
            with monkeypatch.context() as broken:
                broken.setattr(_after_save, "cleared", lambda *_: (None, OSError("no"), []))
                manager.save(2, state(2))
            assert all(file.exists() for file in left)
        manager.save(3, state(3))
    assert not any(file.exists() for file in left)


def test_best_and_regular_steps_lose_the_part_too_and_targets_of_links_do_not(tmp_path):
    rules = ringstow.Retention(last=2, every=3, best=("loss", "min", 1), slim_after=1)
    with ringstow.CheckpointManager(tmp_path, keep=rules) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step), metrics={"loss": step})
            if step == 2:
                (tmp_path / "mine").symlink_to("step-00000002")
        manager.save(5, state(5), metrics={"loss": 5})
    assert [step.step for step in ringstow.steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert whole(tmp_path) == [2, 5]


def test_restore_says_what_the_step_lacks(tmp_path, caplog):
    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=1)) as manager:
        save_all(manager, [1, 2])
        assert manager.restore().dropped == ()
        assert "slim" not in caplog.text
        assert manager.restore(1).dropped == ("optimizer",)
    assert "`slim` has dropped optimizer from this checkpoint" in caplog.text


def test_restore_says_what_the_step_has_lost_since_it_was_listed(tmp_path, monkeypatch, caplog):
    with ringstow.CheckpointManager(tmp_path, keep=ringstow.Retention(slim_after=2)) as manager:
        save_all(manager, [1])
        load = manager._side.load

        def slimmed(found, *args, **options):
            ringstow.slim(found.path, ["optimizer"])
            return load(found, *args, **options)

        monkeypatch.setattr(manager._side, "load", slimmed)
        restored = manager.restore()
    assert (list(restored.state), restored.dropped) == (["model"], ("optimizer",))
    assert "`slim` has dropped optimizer from this checkpoint" in caplog.text
