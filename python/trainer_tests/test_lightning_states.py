"""What a run's checkpoint holds, and code that changes it between the save and the next step."""

from __future__ import annotations

import dataclasses
import enum
import os
import threading

import lightning.pytorch as lightning
import pytest
import torch
from held_save import LARGE, ONE
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning_runs import Model, ModelCheckpoint, RingstowCheckpointIO, model, saved, trainer
from support import assert_same

import ringstow
from ringstow._saving import _guard
from ringstow._state.tensors._memory import LazyTensor


def test_an_hparam_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path):
    class Configured(lightning.LightningModule):
        def __init__(self, width, loss):
            super().__init__()
            self.save_hyperparameters()

    one = Configured(3, loss=torch.nn.functional.mse_loss)
    state = {"hyper_parameters": dict(one.hparams)}
    with pytest.raises(ringstow.InvalidStateError, match=r"hyper_parameters.*loss") as caught:
        RingstowCheckpointIO().save_checkpoint(state, tmp_path / "a.ckpt")
    assert caught.value.__notes__ == ["In Lightning: RingstowCheckpointIO(allow_pickle=True)"]
    assert os.listdir(tmp_path) == []

    io = RingstowCheckpointIO(allow_pickle=True)
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt") == state
    with pytest.raises(ringstow.UnsupportedError):
        io.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(ringstow.UnsupportedError):
        RingstowCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)


class Loss(enum.Enum):
    MSE = "mse"


@dataclasses.dataclass
class Settings:
    loss: Loss = Loss.MSE
    owner: object = None


@pytest.fixture
def at(tmp_path):
    saved(tmp_path / "old-0.ckpt")  # so that saves run in the background
    return tmp_path


@pytest.mark.parametrize("hparam", [Loss.MSE, Settings(), [{"loss": Loss.MSE}]])
def test_hparams_that_refer_back_to_their_class_come_back(hparam, at):
    io = RingstowCheckpointIO()
    state = {"hyper_parameters": {"one": hparam}, "state_dict": {"w": torch.ones(1)}}
    for number in (1, 2):
        io.save_checkpoint(state, at / f"new-{number}.ckpt")
    assert io.load_checkpoint(at / "new-2.ckpt") == state


def test_an_hparam_that_refers_back_to_its_owner_is_named(at):
    settings = Settings()
    settings.owner = [settings]
    with pytest.raises(ringstow.InvalidStateError, match=r"hyper_parameters.*contains itself"):
        RingstowCheckpointIO().save_checkpoint({"hyper_parameters": {"one": settings}}, at / "new")


class Data(lightning.LightningDataModule):
    def __init__(self, size=3):
        super().__init__()
        self.save_hyperparameters()

    def state_dict(self):
        return {"seen": {"a": (1, 2)}}

    def train_dataloader(self):
        return Model.train_dataloader(self)

    def val_dataloader(self):
        return Model.val_dataloader(self)


def schedules(optimizer):
    every = torch.optim.lr_scheduler
    return [
        every.OneCycleLR(optimizer, 0.1, total_steps=90),
        every.MultiStepLR(optimizer, [1, 1, 3]),
        every.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        every.CosineAnnealingWarmRestarts(optimizer, 3),
        every.SequentialLR(
            optimizer, [every.ConstantLR(optimizer), every.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ]


def as_lightning_saves(run, path):
    """Save the same moment by Lightning's own plugin, and load it."""
    ours, run.strategy.checkpoint_io = run.strategy.checkpoint_io, TorchCheckpointIO()
    run.save_checkpoint(path)
    run.strategy.checkpoint_io = ours
    return torch.load(path, weights_only=False)


def test_what_lightning_puts_into_a_checkpoint_needs_no_pickle(at):
    one = model()
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
    one.configure_optimizers = lambda: ([optimizer], schedules(optimizer))
    run = trainer(
        at,
        callbacks.EarlyStopping("score", patience=9),
        callbacks.Timer(),
        callbacks.LearningRateMonitor(),
        io=RingstowCheckpointIO(),
        precision="bf16-mixed",
        logger=CSVLogger(at / "logs"),
    )
    run.fit(one, datamodule=Data())
    run.save_checkpoint(at / "ours.ckpt")
    ours, stock = ringstow.load(at / "ours.ckpt"), as_lightning_saves(run, at / "stock.ckpt")
    assert_same(ours, stock)
    assert ours["Data"] == {"seen": {"a": (1, 2)}}
    assert (len(ours["lr_schedulers"]), len(ours["callbacks"])) == (5, 3)


@pytest.mark.parametrize(
    "average",
    [
        lambda: callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1),
        lambda: callbacks.WeightAveraging(),
        lambda: callbacks.EMAWeightAveraging(),
    ],
)
def test_averaged_weights_are_saved_as_they_were_at_the_call(average, at):
    def run(root, io):
        one = model()
        if isinstance(made := average(), callbacks.StochasticWeightAveraging):
            one.configure_optimizers = lambda: torch.optim.AdamW(one.parameters())
        kept = ModelCheckpoint(dirpath=root, save_top_k=-1, every_n_train_steps=3)
        trainer(root, made, kept, io=io, epochs=4).fit(one)

    run(at / "stock", None)
    saved(at / "ours" / "old-0.ckpt")
    run(at / "ours", RingstowCheckpointIO())
    names = os.listdir(at / "stock")
    assert len(names) == 8
    for name in names:
        ours, stock = ringstow.load(at / "ours" / name), torch.load(at / "stock" / name)
        for checkpoint in (ours, stock):
            del checkpoint["callbacks"][next(k for k in stock["callbacks"] if "Model" in k)]
        assert_same(ours, stock)


def test_a_change_before_the_next_step_fails_the_run_and_says_what_to_do(held, at):
    io = RingstowCheckpointIO(config=ONE)
    weight = torch.zeros(LARGE)
    io.save_checkpoint({"state_dict": held.state({"w": weight})}, at / "new-1.ckpt")
    weight.add_(1)
    held.release()
    with pytest.raises(ringstow.TornSaveError, match="state_dict.w") as caught:
        io.teardown()
    assert caught.value.__notes__ == ['In Lightning: RingstowCheckpointIO(staging="wait")']
    assert os.listdir(at) == ["old-0.ckpt"]


def test_a_training_step_that_writes_past_torchs_versions_waits_for_the_save(tmp_path, monkeypatch):
    """Lightning runs it in the optimizer's step: the wait must come before it, not after it."""
    may_go_on, at_call = threading.Event(), {}
    wait = _guard.Hold.wait

    def waiting(hold):
        may_go_on.set()
        wait(hold)

    def load():
        assert may_go_on.wait(300)
        return torch.zeros(1 << 20)

    class Written(Model):
        def training_step(self, batch, index):
            if self.global_step == 4:
                self.net[0].weight.data.zero_()
                may_go_on.set()
            return super().training_step(batch, index)

        def on_save_checkpoint(self, checkpoint):
            if checkpoint["global_step"] == 4:
                may_go_on.clear()
                at_call.update({key: one.clone() for key, one in checkpoint["state_dict"].items()})
                checkpoint["hold"] = LazyTensor("F32", (1 << 20,), 4 << 20, load)

    monkeypatch.setattr(_guard.Hold, "wait", waiting)
    kept = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, kept, io=RingstowCheckpointIO(config=ONE), epochs=1).fit(Written())
    found = ringstow.load(tmp_path / "epoch=0-step=4.ckpt")["state_dict"]
    assert_same(dict(found), at_call)
