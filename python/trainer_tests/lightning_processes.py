"""Runs of Lightning in processes of their own, which end at a moment that a test names."""

from __future__ import annotations

import os
import resource
import threading

import children
import pytest
from children import die
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import BATCHES, RingstowCheckpointIO, fit, model, state, trainer
from lightning_runs import lightning as pytorch_lightning

import ringstow
from ringstow._state.tensors._memory import LazyTensor
from ringstow.integrations._lightning import _paths

EVERY = 2  # steps between two saves of one kind
EPOCHS = 3

children.preload(__name__)


class Batches(pytorch_lightning.Callback):
    """Tells when the next batch has begun: its step waits for the save."""

    def __init__(self):
        self.has_begun = threading.Event()

    def on_train_batch_start(self, *_):
        self.has_begun.set()


class Begin(pytorch_lightning.Callback):
    """Has the step that a run began with; None if it had ended."""

    step = None

    def on_train_start(self, run, module):
        self.step = run.global_step


def checkpoints(root, save_last):
    return ModelCheckpoint(dirpath=root, save_last=save_last, every_n_train_steps=EVERY)


def start(root, save_last, ckpt_path=None, on_save=None, *more):
    one = model()
    if on_save is not None:
        one.on_save_checkpoint = on_save
    # Not by epochs: Lightning (2.6.6, its own plugin too) trains batches twice in a run that was
    # resumed from a step at an epoch's end, and then again.
    steps = EPOCHS * BATCHES
    kept = checkpoints(root, save_last)
    run = trainer(root, kept, *more, io=RingstowCheckpointIO(), epochs=-1, max_steps=steps)
    run.fit(one, ckpt_path=ckpt_path)
    return run


def killed(root, save_last, moment, number):
    """Train, and be killed at a moment of one of the saves, counted from 1."""
    batches, count = Batches(), 0

    def load():
        if moment == "training":
            batches.has_begun.wait(300)
        die()

    def on_save(checkpoint):
        nonlocal count
        count += 1
        batches.has_begun.clear()
        if count == number:
            # A shard holds large tensors first.
            elements = 1 if moment == "copied" else 1 << 20
            checkpoint["hold"] = LazyTensor("F32", (elements,), 4 * elements, load)

    if moment == "removing":
        _paths.remove = lambda *_: die()
        number = 0
    if moment == "naming":
        rename = os.rename
        os.rename = lambda one, other: die() if "last" in str(other) else rename(one, other)
        number = 0
    start(root, save_last, None, on_save, batches)


def resumed(root, save_last):
    """Resume as a user does after a kill; return what was learned, and the step it began with."""
    newest = ringstow.latest(root)
    path = "last" if save_last else newest and newest.path
    begin = Begin()
    run = start(root, save_last, path, None, begin)
    return run.global_step if begin.step is None else begin.step, state(run)


def filling_the_disk(root, at_step):
    """Train; from a step on no file may grow beyond a few pages, and fit raises it."""

    class Full(pytorch_lightning.Callback):
        def on_train_batch_start(self, run, module, batch, index):
            if run.global_step == at_step:
                run.strategy.checkpoint_io.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))

    with pytest.raises(OSError, match="File too large"):
        start(root, None, None, None, Full())


def as_nobody(root):
    """Train in a directory that cannot be written: fit raises it."""
    os.seteuid(65534)
    with pytest.raises(PermissionError):
        fit(root, RingstowCheckpointIO())


def saving_after_the_run(root):
    """Leave a background save that fails behind at the exit."""
    run = fit(root, RingstowCheckpointIO(), epochs=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    run.save_checkpoint(os.path.join(root, "final-2.ckpt"))
