"""A Trainer's other arguments and methods: runs end as the stock Trainer's, or are refused."""

from __future__ import annotations

import os
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
import torch
import transformers
from support import assert_same
from transformers_runs import (
    BEST,
    EVERY,
    FIRST_IS_BEST,
    RingstowTrainer,
    Rows,
    arguments,
    both,
    checkpoints,
    fit,
    model,
    state,
    trainer,
)

import ringstow
from ringstow.integrations import transformers as integration
from ringstow.integrations.transformers import RingstowTrainerMixin


def the_best_is_the_first(root, kind):
    run = fit(root, kind=kind, load_best_model_at_end=True, **FIRST_IS_BEST)
    assert os.path.basename(run.state.best_model_checkpoint) == f"checkpoint-{EVERY}"
    return run


def save_strategy_best(root, kind):
    return fit(root, kind=kind, save_strategy="best", load_best_model_at_end=True, **BEST)


def save_steps_as_a_ratio(root, kind):
    return fit(root, kind=kind, save_steps=0.5)


def a_callback_that_asks_for_a_save(root, kind):
    class Asks(transformers.TrainerCallback):
        def on_step_end(self, args, one, control, **_):
            control.should_save = one.global_step == 3

    return fit(root, kind=kind, save_strategy="no", callbacks=[Asks()])


def more_steps_when_resumed(root, kind):
    fit(root, kind=kind, max_steps=4)
    return fit(root, kind=kind, ignore_data_skip=True)


def a_schedule_that_follows_the_metric(root, kind):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", **BEST}
    fit(root, kind=kind, **options)
    return fit(root, kind=kind, resume=f"{root}/checkpoint-4", **options)


def a_batch_that_does_not_fit_into_memory(root, kind):
    class Full(kind):
        steps = 0

        def training_step(self, *args, **options):
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **options)

    return fit(root, kind=Full, auto_find_batch_size=True)


def train_twice_and_save_the_model(root, kind):
    run = trainer(root, kind=kind)
    run.train()
    run.train(resume_from_checkpoint=f"{root}/checkpoint-4")
    run.save_model()
    run.save_state()
    return run


@pytest.mark.parametrize(
    "program",
    [
        the_best_is_the_first,
        save_strategy_best,
        save_steps_as_a_ratio,
        a_callback_that_asks_for_a_save,
        more_steps_when_resumed,
        a_schedule_that_follows_the_metric,
        a_batch_that_does_not_fit_into_memory,
        train_twice_and_save_the_model,
    ],
)
def test_it_ends_as_with_the_stock_trainer(tmp_path, program):
    found = [(state(run), checkpoints(root)) for root, run in both(tmp_path, program)]
    assert_same(*found)


class Tied(torch.nn.Module):
    """Not a model of Transformers', with tied weights, which the stock Trainer cannot save."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("compiled", [False, True])
def test_tied_weights_of_any_module_come_back_tied(tmp_path, compiled):
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}

    def made():
        args = arguments(tmp_path, **options)
        return RingstowTrainer(model=Tied(), args=args, train_dataset=Rows())

    whole, resumed = made(), made()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.model.head.weight is resumed.model.embedding.weight


@pytest.mark.parametrize("name", ["save_model", "_save", "_save_optimizer_and_scheduler"])
def test_a_method_that_would_not_be_called_is_refused(name):
    with pytest.raises(ringstow.UnsupportedError, match=f"Mine.{name} would not be called"):
        type("Mine", (RingstowTrainer,), {name: lambda *_: None})
    theirs = type("Theirs", (transformers.Trainer,), {name: lambda *_: None})
    with pytest.raises(ringstow.UnsupportedError, match=f"Theirs.{name} would not be called"):
        type("Mine", (RingstowTrainerMixin, theirs), {})


def test_a_method_behind_the_mixin_s_is_refused_unless_the_class_defines_it(tmp_path):
    class Theirs(transformers.Trainer):
        def _save_checkpoint(self, model, trial):
            raise AssertionError

    with pytest.raises(ringstow.UnsupportedError, match="Define _save_checkpoint in Mine"):
        type("Mine", (RingstowTrainerMixin, Theirs), {})

    class Mine(RingstowTrainerMixin, Theirs):
        saves = 0

        def _save_checkpoint(self, model, trial):
            self.saves += 1
            super()._save_checkpoint(model, trial)

    assert fit(tmp_path, kind=Mine).saves == len(checkpoints(tmp_path)) == 4


def test_weights_that_are_sharded_without_fsdp_are_refused(tmp_path):
    from torch.distributed.tensor import DeviceMesh, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        run = trainer(tmp_path)
        shards = distribute_tensor(torch.zeros(4), DeviceMesh("cpu", [0]))
        run.model.extra = torch.nn.Parameter(shards)
        with pytest.raises(ringstow.UnsupportedError, match="sharded without FSDP"):
            run.train()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("optim", ["lomo", "schedule_free_adamw"])
def test_an_optimizer_that_writes_outside_of_its_step_waits_for_the_copies(
    tmp_path, monkeypatch, optim
):
    used = []
    save_async = integration.save_async

    def noting(*args, **options):
        used.append(options["staging"])
        return save_async(*args, **options)

    class Named(transformers.TrainerCallback):
        def on_step_end(self, args, one, control, **_):
            if one.global_step == 2:  # not earlier: its package is not installed
                args.optim = optim

    monkeypatch.setattr(integration, "save_async", noting)
    fit(tmp_path, max_steps=2, callbacks=[Named()])
    assert used == ["wait"]


def test_a_torn_save_names_the_attribute_that_prevents_it(tmp_path, monkeypatch):
    handle = Future()
    handle.set_exception(ringstow.TornSaveError("model.weight has changed"))
    run = trainer(tmp_path)
    monkeypatch.setattr(integration, "save_async", Mock(return_value=handle))
    with pytest.raises(ringstow.TornSaveError) as caught:
        run.train()
    assert caught.value.__notes__ == ['In a Trainer: ringstow_staging = "wait"']


def test_a_value_that_only_pickle_saves_is_refused_and_no_switch_is_promised(tmp_path):
    one = model()
    own = torch.optim.SGD(one.parameters(), lr=0.1)
    own.param_groups[0]["thing"] = Rows()
    run = RingstowTrainer(
        model=one, args=arguments(tmp_path), train_dataset=Rows(), optimizers=(own, None)
    )
    with pytest.raises(ringstow.InvalidStateError, match=r"\['thing'\]") as caught:
        run.train()
    assert caught.value.__notes__ == ["A Trainer's saves have no allow_pickle."]


def test_weights_of_another_dtype_are_refused(tmp_path):
    fit(tmp_path, max_steps=2)
    run = trainer(tmp_path, model=model().bfloat16())
    with pytest.raises(ringstow.KeyMismatchError, match="is BF16 .* and F32 .* in the checkpoint"):
        run.train(resume_from_checkpoint=True)


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        trainer(tmp_path / "file").train()
