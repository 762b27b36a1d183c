"""Hugging Face's Trainer saves by ringstow, and resumes as if nothing had happened."""

import errno
import json
import logging
import os
import pathlib
from concurrent.futures import Future

import pytest
import torch
import transformers
from support import assert_same, flip
from transformers_runs import EVERY, STEPS, checkpoints, fit, model, state, trainer

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations import transformers as integration
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._transformers import _refusals


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the end of a run of the stock Trainer."""
    run = fit(tmp_path_factory.mktemp("stock"), kind=transformers.Trainer)
    return state(run)


def test_a_run_ends_as_one_of_the_stock_trainer(tmp_path, unbroken):
    run = fit(tmp_path)
    assert_same(state(run), unbroken)
    names = [f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)]
    assert checkpoints(tmp_path) == names
    assert all(ringstow.verify(tmp_path / name).ok for name in names)
    assert ringstow.latest(tmp_path).path == str(tmp_path / f"checkpoint-{STEPS}")


@pytest.mark.parametrize("step", range(EVERY, STEPS, EVERY))
def test_a_run_resumes_to_the_bit_from_each_checkpoint(tmp_path, unbroken, step):
    fit(tmp_path)
    run = fit(tmp_path, resume=str(tmp_path / f"checkpoint-{step}"))
    assert_same(state(run), unbroken)


def test_a_run_resumes_from_what_the_stock_trainer_left(tmp_path, unbroken):
    fit(tmp_path, kind=transformers.Trainer)
    for name in checkpoints(tmp_path)[2:]:
        (tmp_path / name).rename(tmp_path / f"other-{name}")
    assert_same(state(fit(tmp_path)), unbroken)


def test_from_pretrained_opens_a_checkpoint_and_writes_no_weights_twice(tmp_path):
    run = fit(tmp_path)
    path = tmp_path / f"checkpoint-{STEPS}"
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert_same(loaded.state_dict(), run.model.state_dict())
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not list(path.glob("*.bin.*"))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    weights = sum(t.nbytes for t in {id(t): t for t in run.model.parameters()}.values())
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

    run = fit(
        tmp_path,
        kind=Chosen,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=EVERY,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    best = run.state.best_model_checkpoint
    assert best is not None
    assert os.path.basename(best) in checkpoints(tmp_path)
    assert len(checkpoints(tmp_path)) <= 2
    saved = ringstow.load(best)
    saved.pop("__trainer__")
    assert_same(dict(run.model.state_dict()), saved)


def test_the_best_is_that_of_the_stock_trainer(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": EVERY,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "greater_is_better": True,  # the first is the best: it must outlive all others
        "metric_for_best_model": "eval_loss",
    }
    kinds = {"ours": integration.RingstowTrainer, "stock": transformers.Trainer}
    runs = {}
    for name, kind in kinds.items():
        (tmp_path / name).mkdir()
        runs[name] = fit(tmp_path / name, kind=kind, **options)
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "stock")
    best = [os.path.basename(run.state.best_model_checkpoint) for run in runs.values()]
    assert best[0] == best[1] == f"checkpoint-{EVERY}"
    assert_same(*(run.model.state_dict() for run in runs.values()))


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


class Fails(integration.RingstowTrainer):
    """Its second save fails after it has begun."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.state.global_step == 2 * EVERY:
            saves = self._RingstowTrainerMixin__flight
            end = saves.end

            def failing():
                end()
                saves.end = end
                return OSError(28, "No space left on device")

            saves.end = failing


@pytest.mark.parametrize("steps", [STEPS, 2 * EVERY])
def test_a_failed_save_ends_the_run(tmp_path, steps):
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, kind=Fails, max_steps=steps)


def test_a_failed_save_leaves_no_checkpoint_and_the_next_run_goes_on(
    tmp_path, monkeypatch, unbroken
):
    sync = _rename_when_complete.sync

    def fails(path):
        if path.endswith(f"checkpoint-{2 * EVERY}"):
            raise OSError(5, "Input/output error")
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(_rename_when_complete, "sync", fails)
        with pytest.raises(OSError, match="Input/output"):
            fit(tmp_path)
    assert checkpoints(tmp_path) == [f"checkpoint-{EVERY}"]
    assert_same(state(fit(tmp_path)), unbroken)


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, monkeypatch, can_swap):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    if not can_swap:
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

    (tmp_path / "run").mkdir()
    with pytest.raises(ringstow.InvalidStateError, match="cannot be striped"):
        fit(tmp_path / "run", kind=Striped)


def test_a_peft_model_is_refused_before_the_first_step(tmp_path):
    run = trainer(tmp_path)
    run.model.peft_config = {}
    with pytest.raises(ringstow.UnsupportedError, match="make the model by peft.get_peft_model"):
        run.train()
    assert run.state.global_step == 0


def test_fsdp1_is_refused_before_the_first_step(tmp_path):
    run = trainer(tmp_path)
    run.is_fsdp_enabled = True  # Accelerate makes no FSDP1 without a GPU
    with pytest.raises(ringstow.UnsupportedError, match='FSDP1: use fsdp_config={"version": 2}'):
        run.train()


def test_uploads_that_meet_a_save_in_flight_are_refused(tmp_path):
    run = trainer(tmp_path)
    run.args.push_to_hub = True
    with pytest.raises(ringstow.UnsupportedError, match="push_to_hub"):
        run.train()


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
    from transformers_runs import Rows

    run = Mine(model=model(), args=args, train_dataset=Rows())
    run.train()
    assert ringstow.verify(tmp_path / "checkpoint-2").ok


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    import snippets
    from transformers_runs import Rows, arguments

    page = pathlib.Path(__file__).parents[2] / "docs" / "trainers" / "huggingface.md"
    monkeypatch.chdir(tmp_path)
    names = {
        "model": model(),
        "args": arguments("run"),
        "dataset": Rows(),
        "lora_args": arguments("lora"),
        "base": model(),
    }
    for line, code in snippets.snippets(page, "Transformers"):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    assert names["trainer"].state.global_step == STEPS
