"""With ringstow's plugin a run keeps the checkpoints that it keeps with Lightning's own."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_runs import ModelCheckpoint, RingstowCheckpointIO, fit, model, state, trainer
from support import assert_same

import ringstow

CHECKPOINTS = {
    "default": {},
    "every-step": {"every_n_train_steps": 1},
    "all": {"save_top_k": -1, "every_n_train_steps": 4},
    "last": {"save_last": True, "every_n_train_steps": 2},
    "last-only": {"save_top_k": 0, "save_last": True},
    "link": {"save_last": "link", "every_n_train_steps": 2},
    "monitor": {"monitor": "score", "save_top_k": 2},
    "monitor-max": {"monitor": "score", "mode": "max", "save_last": True},
    "monitor-link": {"monitor": "score", "save_top_k": 2, "save_last": "link"},
    "one-name": {"monitor": "score", "save_top_k": 2, "filename": "best"},
    "metric-in-name": {"monitor": "score", "filename": "{epoch}-{score:.2f}", "save_top_k": 3},
    "folders": {"filename": "{epoch}/{step}", "save_last": "link", "every_n_train_steps": 3},
    "weights": {"save_weights_only": True, "save_last": True},
    "no-version": {"filename": "one", "enable_version_counter": False},
    "time": {"train_time_interval": timedelta(0)},
}


def kept(root):
    """Return the names of all checkpoints, and where links lead to."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            if name.endswith(".ckpt") or os.path.islink(path):
                link = os.readlink(path) if os.path.islink(path) else None
                found[os.path.relpath(path, root)] = link
    return found


def both(at, run):
    """Run with Lightning's own plugin and with ringstow's, in a directory of one name."""
    root = at / "run"
    run(root, None)
    root.rename(at / "stock")
    run(root, RingstowCheckpointIO())
    assert kept(root) == kept(at / "stock")
    for name in kept(root):
        expected = torch.load(at / "stock" / name, weights_only=False)
        assert_same(ringstow.load(root / name), expected)
        assert ringstow.verify(root / name).ok
    return root


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_the_same_checkpoints_with_the_same_content_are_kept(case, tmp_path):
    root = both(tmp_path, lambda root, io: fit(root, io, epochs=5, **CHECKPOINTS[case]))
    assert kept(root)


def test_two_callbacks_in_one_directory_keep_checkpoints_of_their_own(tmp_path):
    def run(root, io):
        callbacks = [
            ModelCheckpoint(dirpath=root, monitor="score", save_last=True),
            ModelCheckpoint(dirpath=root, monitor="score", mode="max", save_last=True),
            ModelCheckpoint(dirpath=root, save_top_k=-1, every_n_epochs=2),
        ]
        trainer(root, *callbacks, io=io, epochs=5).fit(model())

    assert len(kept(both(tmp_path, run))) > 4


@pytest.mark.parametrize("case", ["last", "link", "monitor", "one-name", "all", "last-only"])
def test_a_resumed_run_keeps_the_same_checkpoints(case, tmp_path):
    how = "last" if "last" in case or case == "link" else None

    def run(root, io):
        first = fit(root, io, epochs=2, **CHECKPOINTS[case])
        path = how or first.checkpoint_callback.best_model_path
        second = fit(root, io, epochs=4, ckpt_path=path, **CHECKPOINTS[case])
        assert second.global_step == 24

    both(tmp_path, run)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_resumes_to_the_bit(save_last, tmp_path):
    unbroken = fit(tmp_path / "a", epochs=4)
    fit(tmp_path / "b", RingstowCheckpointIO(), epochs=2, save_last=save_last)
    io = RingstowCheckpointIO()
    resumed = fit(tmp_path / "b", io, epochs=4, ckpt_path="last", save_last=save_last)
    assert resumed.ckpt_path == str(tmp_path / "b" / "last.ckpt")
    assert_same(state(resumed), state(unbroken))


def test_best_is_loaded_for_a_test_and_latest_for_a_resume(tmp_path):
    run = fit(tmp_path, RingstowCheckpointIO(), epochs=4, monitor="score", save_top_k=2)
    best = ringstow.load(run.checkpoint_callback.best_model_path)
    assert best["epoch"] == 0
    with torch.no_grad():
        run.lightning_module.net[0].weight.zero_()
    run.validate(ckpt_path="best")
    assert_same(run.lightning_module.state_dict(), best["state_dict"])
    newest = ringstow.latest(tmp_path).path
    assert newest.endswith("epoch=3-step=24.ckpt")
    assert ringstow.steps(tmp_path)[-1].step == 24
    resumed = fit(tmp_path, RingstowCheckpointIO(), epochs=6, ckpt_path=newest)
    assert_same(state(resumed), state(fit(tmp_path / "unbroken", epochs=6)))


def test_weights_only_holds_no_optimizer(tmp_path):
    run = fit(tmp_path, RingstowCheckpointIO(), save_weights_only=True)
    assert "optimizer_states" not in ringstow.load(run.checkpoint_callback.best_model_path)


def test_an_exception_leaves_a_checkpoint_that_last_finds(tmp_path):
    class Interrupted(Exception):
        pass

    def raise_once(trainer, module, outputs, batch, index):
        if trainer.global_step == 8:
            raise Interrupted

    def run(on_batch_end=None, **options):
        callback = OnExceptionCheckpoint(tmp_path, "stopped")
        one = trainer(tmp_path, callback, io=RingstowCheckpointIO(), **options)
        if on_batch_end:
            callback.on_train_batch_end = on_batch_end
        one.fit(model())
        return one

    with pytest.raises(Interrupted):
        run(raise_once)
    assert ringstow.load(tmp_path / "stopped.ckpt")["global_step"] == 8
    resumed = run()  # Lightning finds it by itself
    assert resumed.ckpt_path == str(tmp_path / "stopped.ckpt")
    assert_same(state(resumed), state(fit(tmp_path / "unbroken")))
    assert not (tmp_path / "stopped.ckpt").exists()  # the callback removes it at the end


def test_a_run_goes_on_from_the_files_of_lightning(tmp_path):
    fit(tmp_path, None, epochs=2, save_last=True, every_n_train_steps=4)
    assert (tmp_path / "last.ckpt").is_file()
    io = RingstowCheckpointIO()
    options = {"save_last": True, "every_n_train_steps": 4}
    run = fit(tmp_path, io, epochs=4, ckpt_path="last", **options)
    assert_same(state(run), state(fit(tmp_path / "unbroken", epochs=4)))
    # The file became a directory, and ModelCheckpoint removed the older file.
    assert sorted(os.listdir(tmp_path)) == ["epoch=3-step=24.ckpt", "last.ckpt", "unbroken"]
    assert ringstow.load(tmp_path / "last.ckpt")["global_step"] == 24


def test_a_link_to_last_becomes_a_checkpoint_and_its_target_stays(tmp_path):
    fit(tmp_path, RingstowCheckpointIO(), epochs=2, save_last="link")
    old = ringstow.load(tmp_path / "epoch=1-step=12.ckpt")
    run = fit(
        tmp_path, RingstowCheckpointIO(), epochs=3, ckpt_path="last", save_top_k=0, save_last=True
    )
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert ringstow.load(tmp_path / "last.ckpt")["global_step"] == run.global_step == 18
    assert_same(ringstow.load(tmp_path / "epoch=1-step=12.ckpt"), old)


def test_a_sweep_for_learning_rate_and_batch_size_leaves_nothing(tmp_path):
    from lightning.pytorch.tuner import Tuner

    one = model()
    one.rate = 0.01
    run = trainer(tmp_path, io=RingstowCheckpointIO(), enable_checkpointing=False)
    before = one.net[0].weight.clone()
    Tuner(run).lr_find(one, num_training=10, attr_name="rate")
    assert torch.equal(one.net[0].weight, before)
    assert kept(tmp_path) == {}
