"""A Trainer of a PeftModel saves what it trains, in files that peft opens, and resumes."""

from __future__ import annotations

import os
import signal
from shutil import copytree

import children
import peft
import pytest
import torch
import transformers
import transformers_processes as processes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import assert_same
from transformers_runs import (
    EVERY,
    FIRST_IS_BEST,
    STEPS,
    adapters,
    both,
    checkpoints,
    fit,
    model,
    state,
    trainer,
)

import ringstow
from ringstow.integrations._transformers import _adapters

FILES = ("adapter_config.json", "adapter_model.safetensors", "README.md")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return the directory of a run of the stock Trainer, and its end."""
    root = tmp_path_factory.mktemp("stock")
    return root, state(fit(root, model=adapters(), kind=transformers.Trainer))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Return the directory of a run of RingstowTrainer; tests only read it."""
    root = tmp_path_factory.mktemp("ours")
    return root, fit(root, model=adapters())


@pytest.fixture
def copied(ours, tmp_path):
    """Return a copy of the run's directory."""
    return copytree(ours[0], tmp_path / "run")


def test_a_run_ends_as_one_of_the_stock_trainer_and_writes_the_same_files(ours, stock):
    root, run = ours
    assert_same(state(run), stock[1])
    for step in range(EVERY, STEPS + 1, EVERY):
        for name in FILES:
            mine, theirs = (one / f"checkpoint-{step}" / name for one in (root, stock[0]))
            assert mine.read_bytes() == theirs.read_bytes(), name
        assert ringstow.verify(root / f"checkpoint-{step}").ok


@pytest.mark.parametrize("step", range(EVERY, STEPS, EVERY))
def test_a_run_resumes_to_the_bit_from_its_own_checkpoints_and_the_stock_trainers(
    tmp_path, ours, stock, step
):
    for number, root in enumerate((ours[0], stock[0])):
        path = str(root / f"checkpoint-{step}")
        resumed = fit(tmp_path / str(number), model=adapters(), resume=path)
        assert_same(state(resumed), stock[1])


def test_a_checkpoint_holds_no_frozen_weight(ours):
    root, run = ours
    path = root / f"checkpoint-{STEPS}"
    frozen = {name for name, one in run.model.named_parameters() if not one.requires_grad}
    trained = sum(one.nbytes for one in run.model.parameters() if one.requires_grad)
    assert frozen
    with ringstow.open(path) as opened:
        assert not frozen & set(opened)
        assert opened.info.tensor_bytes < 3.1 * trained  # with the optimizer's two moments
    assert not (path / "model.safetensors.index.json").exists()


def test_peft_opens_a_checkpoint(ours):
    root, run = ours
    loaded = peft.PeftModel.from_pretrained(model(), root / f"checkpoint-{STEPS}")
    assert_same(loaded.state_dict(), run.model.state_dict())


def test_auto_peft_model_and_from_pretrained_open_a_checkpoint(tmp_path):
    model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    run = fit(tmp_path / "run", model=adapters(base, modules_to_save=None))
    path = tmp_path / "run" / f"checkpoint-{STEPS}"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(path)
    assert_same(loaded.state_dict(), run.model.state_dict())
    with_adapter = transformers.AutoModelForCausalLM.from_pretrained(path)
    row = {"input_ids": torch.arange(8).reshape(1, 8)}
    with torch.no_grad():
        assert_same(with_adapter(**row).logits, loaded.eval()(**row).logits)


def test_the_stock_trainer_resumes_the_adapter(copied, ours):
    run = trainer(copied, model=adapters(), kind=transformers.Trainer)
    run.train(resume_from_checkpoint=True)  # at its end already: it changes nothing
    assert run.state.global_step == STEPS
    assert_same(run.model.state_dict(), ours[1].model.state_dict())


def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    options = {"load_best_model_at_end": True, **FIRST_IS_BEST}
    found = [
        (checkpoints(root), run.model.state_dict())
        for root, run in both(tmp_path, model=adapters, **options)
    ]
    assert_same(*found)
    assert found[0][0] == [f"checkpoint-{EVERY}"]


def two_adapters():
    one = adapters()
    one.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    return one


def test_several_adapters_come_back_and_are_where_peft_puts_them(tmp_path):
    (ours, _), (theirs, run) = both(tmp_path, model=two_adapters)
    end = state(run)
    for name in (*FILES, "other/adapter_config.json", "other/adapter_model.safetensors"):
        mine, stock = (one / f"checkpoint-{STEPS}" / name for one in (ours, theirs))
        assert mine.read_bytes() == stock.read_bytes(), name
    assert_same(state(fit(ours, model=two_adapters, resume=f"{ours}/checkpoint-4")), end)


def assert_resumes(at, made):
    """A run with a model that ``made`` makes ends the same from its second save; return it."""
    run = fit(at, model=made())
    end = state(run)
    assert_same(state(fit(at, model=made(), resume=str(at / "checkpoint-4"))), end)
    return run


def test_what_is_trained_beside_the_adapters_comes_back(tmp_path):
    def made():
        one = adapters()
        one.get_base_model().model.norm.weight.requires_grad_(True)
        return one

    assert_resumes(tmp_path, made)


@pytest.mark.parametrize("reparameterized", [False, True])
def test_prompt_learning_resumes_to_the_bit(tmp_path, reparameterized):
    kind = peft.PromptEncoderConfig if reparameterized else peft.PromptTuningConfig
    options = {"encoder_hidden_size": 16} if reparameterized else {}

    def made():
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)
        return peft.get_peft_model(model(), config)

    run = assert_resumes(tmp_path, made)
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path / f"checkpoint-{STEPS}")
    row = {"input_ids": torch.arange(8).reshape(1, 8)}
    with torch.no_grad():
        assert_same(loaded.eval()(**row).logits, run.model.eval()(**row).logits)


def test_a_quantized_base_is_not_saved(tmp_path):
    def made():
        base = model()
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        base.quantized = torch.nn.Module()  # ringstow.save refuses such a tensor
        base.quantized.register_buffer(
            "weight", torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8)
        )
        return adapters(base)

    run = fit(tmp_path, model=made())
    end = {**state(run), "model": None}
    resumed = fit(tmp_path, model=made(), resume=str(tmp_path / "checkpoint-4"))
    assert_same({**state(resumed), "model": None}, end)


def test_other_adapters_are_refused_with_their_names(tmp_path, ours):
    path = str(ours[0] / "checkpoint-4")
    with pytest.raises(ringstow.KeyMismatchError, match=r"not in the checkpoint: \['other: "):
        fit(tmp_path, model=two_adapters(), resume=path)
    with pytest.raises(ringstow.KeyMismatchError, match=r"only in the checkpoint: \['default: "):
        fit(tmp_path, model=adapters(target_modules=["q_proj"]), resume=path)


def test_a_whole_model_and_adapters_do_not_resume_each_other(tmp_path, ours):
    with pytest.raises(ringstow.InvalidStateError, match="holds adapters"):
        fit(tmp_path, resume=str(ours[0] / "checkpoint-4"))
    fit(tmp_path, max_steps=2)
    with pytest.raises(ringstow.InvalidStateError, match="holds a whole model"):
        fit(tmp_path, model=adapters(), resume=str(tmp_path / "checkpoint-2"))


def test_a_mixed_model_is_refused_before_the_first_step(tmp_path):
    mixed = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"]), mixed=True)
    run = trainer(tmp_path, model=mixed)
    with pytest.raises(ringstow.UnsupportedError, match="make the model by peft.get_peft_model"):
        run.train()
    assert run.state.global_step == 0


def test_a_program_that_writes_over_peft_s_file_leaves_the_shards_whole(copied, stock):
    path = copied / "checkpoint-4"
    file = path / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_file({name: one * 0 for name, one in load_file(file).items()}, file)
    assert ringstow.verify(path).ok
    assert_same(state(fit(copied, model=adapters(), resume=str(path))), stock[1])


def test_slim_leaves_adapters_that_peft_opens(copied, ours):
    path = copied / f"checkpoint-{STEPS}"
    ringstow.slim(path, drop=["__trainer__"])
    loaded = peft.PeftModel.from_pretrained(model(), path)
    assert_same(loaded.state_dict(), ours[1].model.state_dict())


def test_a_failure_to_write_peft_s_file_leaves_no_checkpoint(tmp_path, monkeypatch, stock):
    write, calls = _adapters.write_files, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*args)

    with monkeypatch.context() as patched:
        patched.setattr(_adapters, "write_files", fails)
        with pytest.raises(OSError, match="No space left"):
            fit(tmp_path, model=adapters())
    assert checkpoints(tmp_path) == [f"checkpoint-{EVERY}"]
    assert_same(state(fit(tmp_path, model=adapters())), stock[1])


@pytest.mark.parametrize(("moment", "number"), [("copying", 3), ("filling", 6), ("complete", 3)])
def test_a_killed_run_resumes_to_the_bit(tmp_path, moment, number, stock):
    options = {"has_adapters": True}
    codes = children.exit_codes(0, processes.run, tmp_path, options, moment, number)
    assert codes == [-signal.SIGKILL]
    names = [f".ringstow-checkpoint-{3 * EVERY}", *(f"checkpoint-{n * EVERY}" for n in (1, 2))]
    assert checkpoints(tmp_path) == sorted(names)
    for name in names[1:]:
        assert set(FILES) <= set(os.listdir(tmp_path / name))
        peft.PeftModel.from_pretrained(model(), tmp_path / name)
    (end,) = children.results(0, processes.run, tmp_path, options)
    assert_same(end, {**stock[1], "said": []})
