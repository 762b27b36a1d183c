"""Hugging Face's Trainer saves by ringstow, and resumes as if nothing had happened."""

import errno
import json
import logging
import os
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
import torch
import transformers
from all_trainers import run_page
from support import assert_same, flip
from transformers_runs import (
    BEST,
    EVERY,
    STEPS,
    Rows,
    arguments,
    checkpoints,
    fit,
    model,
    state,
    trainer,
)

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations import transformers as integration
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._transformers import _refusals


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the end of a run of the stock Trainer."""
    return state(fit(tmp_path_factory.mktemp("stock"), kind=transformers.Trainer))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a run's directory, its model and its end; tests do not change them."""
    root = tmp_path_factory.mktemp("ours")
    run = fit(root)
    return root, run.model, state(run)


def test_a_run_ends_as_one_of_the_stock_trainer(finished, unbroken):
    root, _, end = finished
    assert_same(end, unbroken)
    names = [f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)]
    assert checkpoints(root) == names
    assert all(ringstow.verify(root / name).ok for name in names)
    assert ringstow.latest(root).path == str(root / f"checkpoint-{STEPS}")


@pytest.mark.parametrize("step", range(EVERY, STEPS, EVERY))
def test_a_run_resumes_to_the_bit_from_each_checkpoint(finished, tmp_path, unbroken, step):
    run = fit(tmp_path, resume=str(finished[0] / f"checkpoint-{step}"))
    assert_same(state(run), unbroken)


def test_a_run_resumes_from_what_the_stock_trainer_left(tmp_path, unbroken):
    fit(tmp_path, kind=transformers.Trainer)
    for name in checkpoints(tmp_path)[2:]:
        (tmp_path / name).rename(tmp_path / f"other-{name}")
    assert_same(state(fit(tmp_path)), unbroken)


def test_from_pretrained_opens_a_checkpoint_and_writes_no_weights_twice(finished):
    root, made, _ = finished
    path = root / f"checkpoint-{STEPS}"
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert_same(loaded.state_dict(), made.state_dict())
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not list(path.glob("*.bin.*"))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    weights = sum(t.nbytes for t in {id(t): t for t in made.parameters()}.values())
    assert size < 3.5 * weights  # the weights and the optimizer's two moments


def test_the_stock_trainer_resumes_the_weights(tmp_path):
    ours = fit(tmp_path)
    weights = ours.model.state_dict()
    run = trainer(tmp_path, kind=transformers.Trainer)
    run.train(resume_from_checkpoint=True)  # at its end already: it changes nothing
    assert run.state.global_step == STEPS
    assert_same(run.model.state_dict(), weights)
    assert not run.optimizer.state_dict()["state"]


def test_slim_leaves_a_model_that_from_pretrained_opens(tmp_path):
    run = fit(tmp_path)
    path = tmp_path / f"checkpoint-{STEPS}"
    ringstow.slim(path, drop=["__trainer__"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert_same(loaded.state_dict(), run.model.state_dict())


@pytest.mark.parametrize("background", [True, False])
def test_only_the_newest_and_the_best_stay(tmp_path, background):
    class Chosen(integration.RingstowTrainer):
        ringstow_background = background

    run = fit(tmp_path, kind=Chosen, load_best_model_at_end=True, **{**BEST, "save_total_limit": 2})
    best = run.state.best_model_checkpoint
    assert len(checkpoints(tmp_path)) <= 2
    assert os.path.basename(best) in checkpoints(tmp_path)
    saved = ringstow.load(best)
    saved.pop("__trainer__")
    assert_same(dict(run.model.state_dict()), saved)


def test_save_only_model_resumes_with_a_new_optimizer_and_says_so(tmp_path, caplog):
    fit(tmp_path, save_only_model=True)
    assert "__trainer__" not in ringstow.load(tmp_path / "checkpoint-2")
    with caplog.at_level(logging.WARNING, "ringstow"):
        fit(tmp_path, resume=str(tmp_path / "checkpoint-2"), save_only_model=True)
    assert "save_only_model=True" in caplog.text


def test_a_damaged_checkpoint_is_refused(tmp_path):
    fit(tmp_path)
    path = tmp_path / f"checkpoint-{STEPS}"
    flip(path / "rank00000-0.safetensors", 5000)
    with pytest.raises(ringstow.CorruptCheckpointError, match=r"rank00000-0\.safetensors"):
        fit(tmp_path)


class Counting(torch.nn.Module):
    """Has a state that is no tensor."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_state_of_a_module_comes_back(tmp_path):
    run = trainer(tmp_path)
    run.model.counting = Counting()
    run.model.counting.count = 7
    run.train()
    run = trainer(tmp_path)
    run.model.counting = Counting()
    run.train(resume_from_checkpoint=True)
    assert run.model.counting.count == 7


def test_weights_of_another_model_are_refused(tmp_path):
    fit(tmp_path)
    run = trainer(tmp_path)
    run.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ringstow.KeyMismatchError, match=r"extra\.weight"):
        run.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("steps", [STEPS, 2 * EVERY], ids=["in the next save", "at the end"])
def test_a_failed_save_ends_the_run_and_leaves_no_checkpoint_and_the_next_run_goes_on(
    tmp_path, monkeypatch, unbroken, steps
):
    sync = _rename_when_complete.sync

    def fails(path):
        if path.endswith(f"checkpoint-{2 * EVERY}"):
            raise OSError(5, "Input/output error")
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(_rename_when_complete, "sync", fails)
        with pytest.raises(OSError, match="Input/output"):
            fit(tmp_path, max_steps=steps)
    assert checkpoints(tmp_path) == [f"checkpoint-{EVERY}"]
    if steps == STEPS:
        assert_same(state(fit(tmp_path)), unbroken)


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, monkeypatch, can_swap):
    if not can_swap:
        refuse = Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))
        monkeypatch.setattr(_rename_when_complete._native, "swap_names", refuse)
    fit(tmp_path)
    path = tmp_path / f"checkpoint-{STEPS}"
    before = json.loads((path / "manifest.json").read_text())
    fit(tmp_path, resume=False)
    assert json.loads((path / "manifest.json").read_text()) != before
    assert not list(tmp_path.glob(".ringstow-*"))


def test_a_replaced_checkpoint_gets_its_name_back(tmp_path, unbroken):
    fit(tmp_path)
    newest = tmp_path / f"checkpoint-{STEPS}"
    newest.rename(tmp_path / f".ringstow_replaced-{newest.name}")
    (tmp_path / f".ringstow-{newest.name}").mkdir()
    run = fit(tmp_path)
    assert run.state.global_step == STEPS
    assert newest.name in checkpoints(tmp_path)
    assert not list(tmp_path.glob(".ringstow*"))


def test_stripes_are_refused(tmp_path):
    (tmp_path / "disk").mkdir()

    class Striped(integration.RingstowTrainer):
        ringstow_config = ringstow.Config(stripe=[tmp_path / "disk"])

    with pytest.raises(ringstow.InvalidStateError, match="cannot be striped"):
        fit(tmp_path / "run", kind=Striped)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda run: setattr(run.model, "peft_config", {}),
            "make the model by peft.get_peft_model",
        ),
        # Accelerate makes no FSDP1 without a GPU.
        (
            lambda run: setattr(run, "is_fsdp_enabled", True),
            'FSDP1: use fsdp_config={"version": 2}',
        ),
        # Uploads would meet a save in flight.
        (lambda run: setattr(run.args, "push_to_hub", True), "push_to_hub"),
    ],
    ids=["peft", "fsdp1", "uploads"],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path, change, said):
    run = trainer(tmp_path)
    change(run)
    with pytest.raises(ringstow.UnsupportedError, match=said):
        run.train()
    assert run.state.global_step == 0


def test_ctrl_c_in_a_wait_does_not_lose_the_save():
    class Interrupted(Future):
        def exception(self, timeout=None):
            if not self.done():
                raise KeyboardInterrupt
            return super().exception(timeout)

    saves = InFlight()
    saves.handle = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        saves.end()
    saves.handle.set_exception(OSError("lost"))
    assert str(saves.end()) == "lost"
    assert saves.end() is None  # once


@pytest.mark.parametrize("name", _refusals.METHODS)
def test_a_trainer_without_one_of_the_methods_is_refused(name):
    Other = type("Other", (), {seam: None for seam in _refusals.METHODS if seam != name})
    with pytest.raises(ringstow.UnsupportedError, match=f"no {name}\\."):

        class Changed(integration.RingstowTrainerMixin, Other):
            pass


def test_the_mixin_makes_other_trainers_save(tmp_path):
    class Mine(integration.RingstowTrainerMixin, transformers.Seq2SeqTrainer):
        pass

    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[]
    )
    run = Mine(model=model(), args=args, train_dataset=Rows())
    run.train()
    assert ringstow.verify(tmp_path / "checkpoint-2").ok


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, lora = arguments("run"), arguments("lora")
    names = {"model": model(), "args": args, "dataset": Rows(), "lora_args": lora, "base": model()}
    names = run_page("huggingface.md", "Transformers", **names)
    assert names["trainer"].state.global_step == STEPS
