"""The first start after the switch: a run's directory holds what another program has saved."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringstow
from ringstow import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value):
    return {"model": {"w": torch.full((4,), float(value))}, "step": value}


def saved(root, name, value):
    """Save as the programs do whose checkpoints have such names."""
    path = root / name
    root.mkdir(exist_ok=True)
    if path.suffix:
        torch.save(state(value), path)
    else:
        dcp.save(state(value), checkpoint_id=path, no_dist=True)
    return path


NAMES = [
    ("step-{}", 9, 10),
    ("step_{}.pt", 9, 10),
    ("dcp-{}", 9, 10),
    ("run{}", 9, 10),
    ("checkpoint-{}.pth", 500, 1000),
    ("global_step{}", 5, 20),
    ("iter_{:07}", 100, 1000),
    ("epoch=1-step={}.ckpt", 99, 100),
    ("epoch=1-step={}-v1.ckpt", 99, 100),
]


@pytest.mark.parametrize(("name", "older", "newer"), NAMES, ids=[one[0] for one in NAMES])
def test_the_first_start_restores_the_newest_and_saves_beside_it(at, name, older, newer, caplog):
    saved(at, name.format(older), older)
    path = saved(at, name.format(newer), newer)
    assert ringstow.latest(at).path == str(path)
    with CheckpointManager(at, keep=1) as manager:
        assert manager.latest().path == str(path)
        restored = manager.restore()
        assert (restored.step, restored.path) == (newer, str(path))
        assert restored.state["model"]["w"].tolist() == [newer] * 4
        assert "which another program has left" in caplog.text
        manager.save(newer + 1, state(newer + 1))
        manager.save(newer + 2, state(newer + 2))
    assert path.exists()  # another program's: nothing removes it
    with CheckpointManager(at) as manager:
        assert manager.restore().step == newer + 2
    assert ringstow.latest(at).path == str(at / f"step-{newer + 2:08}")


def test_into_is_filled_from_what_another_program_left(at):
    saved(at, "step-7", 7)
    into = state(0)
    with CheckpointManager(at) as manager:
        assert manager.restore(into=into).step == 7
    assert into["model"]["w"].tolist() == [7] * 4
    assert into["step"] == 7


def test_a_step_is_named_among_those_of_both(at):
    saved(at, "checkpoint-5.pt", 5)
    with CheckpointManager(at) as manager:
        manager.save(6, state(6))
        assert manager.restore(5).state["step"] == 5
        assert manager.restore(6).state["step"] == 6
        with pytest.raises(ringstow.NoCheckpointError, match="no step 4"):
            manager.restore(4)


def test_ringstows_steps_count_before_newer_ones_of_another_program(at, caplog):
    with CheckpointManager(at) as manager:
        manager.save(6, state(6))
    newer = saved(at, "checkpoint-9.pt", 9)
    with CheckpointManager(at) as manager:
        assert manager.restore().step == 6
    assert f"ringstow.load('{newer}')" in caplog.text
    assert ringstow.latest(at).path == str(at / "step-00000006")


@pytest.mark.parametrize("name", ["last.ckpt", "epoch=3-val_loss=0.25.ckpt", "best.pt", "final"])
def test_training_never_begins_anew_beside_a_checkpoint_without_a_step(at, name):
    path = saved(at, name, 3)
    with CheckpointManager(at) as manager:
        for call in (manager.restore, manager.latest, lambda: ringstow.latest(at)):
            with pytest.raises(ringstow.InvalidStateError, match="must not begin anew") as caught:
                call()
            assert f"ringstow.load({str(path)!r})" in str(caught.value)


def test_two_checkpoints_of_one_step_are_named(at):
    saved(at, "step-7", 7)
    saved(at, "checkpoint_7.pt", 7)
    with pytest.raises(ringstow.InvalidStateError, match="several checkpoints.*step 7"):
        ringstow.latest(at)


def test_what_was_not_finished_is_passed_over(at, caplog):
    path = saved(at, "checkpoint-5.pt", 5)
    os.truncate(saved(at, "checkpoint-6.pt", 6), 300)
    (at / "checkpoint-7").mkdir()
    torch.save({}, at / "checkpoint-7" / "optimizer.pt")
    assert ringstow.latest(at).path == str(path)
    assert "checkpoint-6.pt is cut short" in caplog.text
    assert "checkpoint-7" in caplog.text


def test_other_files_and_models_are_no_checkpoints_of_the_run(at):
    torch.save({"x": torch.ones(1)}, at / "dataset.pt")
    (at / "events.log").write_text("")
    (at / "checkpoint-3").mkdir()
    assert ringstow.latest(at) is None
    with CheckpointManager(at) as manager:
        assert manager.restore() is None


def test_a_hostile_step_is_refused_and_does_not_run(at):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(at / "mark"),)

    torch.save({"evil": Evil()}, at / "checkpoint-3.pt")
    manager = CheckpointManager(at)
    with pytest.raises(ringstow.UnsupportedError, match="allow_pickle"):
        manager.restore()
    assert not (at / "mark").exists()
