"""The same loop in Hugging Face's Trainer: its own save beside ringstow's and DCP's."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from comparing.durable import fsync_tree
from ringstow.integrations.transformers import RingstowTrainer
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stepping.contenders import ADDED_IN_CALL, DCP_THREAD, OWN, OWN_FILES, PLAIN, Row
from stepping.training import BATCH, WIDTH, Turn, ends, make_model

# More steps than any turn takes: the turn stops the Trainer.
STEPS_MAX = 1_000_000

TRAINER = "trainer"


@dataclass(frozen=True)
class Way(Row):
    kind: type[Trainer] = Trainer
    is_own: bool = True
    """Whether the Trainer saves, and not a callback."""


class Module(torch.nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.model = make_model(size)

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(batch).square().mean()}


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batch = torch.randn(BATCH, WIDTH)
        while True:
            yield {"batch": batch}


class Watch(TrainerCallback):
    """Times the steps, saves once, and stops the Trainer when that save is durable."""

    def __init__(self, way: Way, folder: Path, quiet_steps: int) -> None:
        self._way = way
        self._folder = folder
        self._quiet_steps = quiet_steps
        self._waiter = ThreadPoolExecutor(1)
        self._path = folder
        self._ended: Future[float] | None = None
        self._mark: float | None = None  # when the step began
        self._begun = 0.0
        self.quiet: list[float] = []
        self.blocked: float | None = None
        self.steps: list[float] = []
        self.save = 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        now = time.perf_counter()
        if self._mark is not None:  # the first step makes the moments
            (self.quiet if self.blocked is None else self.steps).append(now - self._mark)
        if self.blocked is not None:
            if (ended := self._durable()) is not None:
                self.save = ended - self._begun
                control.should_training_stop = True
        elif len(self.quiet) == self._quiet_steps:
            self._path = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._begun = time.perf_counter()
            if self._way.is_own:
                control.should_save = True  # the Trainer saves next, and calls on_save
            else:
                self._save_by_dcp(more["model"], more["optimizer"])
        self._mark = time.perf_counter()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if self._way.fsync == ADDED_IN_CALL:
            fsync_tree(self._path)
        self._mark = time.perf_counter()
        self.blocked = self._mark - self._begun
        if self._way.fsync == ADDED_IN_CALL:  # this save has no background
            self.save = self.blocked
            control.should_training_stop = True

    def close(self) -> None:
        self._waiter.shutdown()

    def _save_by_dcp(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        finish = PLAIN[DCP_THREAD].save(state, self._path)
        self.blocked = time.perf_counter() - self._begun
        self._ended = self._waiter.submit(ends, finish)

    def _durable(self) -> float | None:
        """Return when the save was durable, or None if it is not yet."""
        if self._ended is not None:
            return self._ended.result() if self._ended.done() else None
        # RingstowTrainer names the directory once it is durable. It is looked for after each step,
        # so the time is that of the step's end.
        return time.perf_counter() if self._path.exists() else None


class InTheBackground(RingstowTrainer):
    ringstow_background = True  # although `Watch` has on_save: it does not read the checkpoint


class TransformersTrainer:
    """`Trainer.train` with one save in it: a Trainer for each turn.

    Stock transformers has no asynchronous save. ``dcp-callback`` is what its users write: a
    callback that calls torch's ``async_save``.
    """

    contenders: Mapping[str, Way] = {
        "ringstow": Way(("ringstow",), OWN, kind=InTheBackground),
        "dcp-callback": Way(("torch",), OWN_FILES, is_own=False),
        TRAINER: Way(("transformers",), ADDED_IN_CALL),
    }

    def __init__(self, size: float, directory: Path, quiet_steps: int) -> None:
        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore", module="transformers")
        self._module = Module(size)
        self._directory = directory
        self._quiet_steps = quiet_steps

    def turn(self, name: str) -> Turn:
        """Train, save by the contender, and train until the save is durable."""
        way = self.contenders[name]
        folder = self._directory / name
        shutil.rmtree(folder, ignore_errors=True)
        watch = Watch(way, folder, self._quiet_steps)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=STEPS_MAX, per_device_train_batch_size=1,
            optim="adamw_torch", max_grad_norm=0.0, save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
            accelerator_config={"dispatch_batches": False},
        )  # fmt: skip
        trainer = way.kind(
            model=self._module, args=arguments, train_dataset=Batches(), callbacks=[watch],
            data_collator=lambda rows: rows[0],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        folder.mkdir(exist_ok=True)
        os.sync()
        try:
            trainer.train()
        finally:
            watch.close()
        assert watch.blocked is not None
        return Turn(watch.quiet, watch.blocked, watch.steps, watch.save)
