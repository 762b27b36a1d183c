"""A Trainer of a PeftModel saves what it trains, in files that peft opens, and resumes."""

from __future__ import annotations

import os
import signal

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
    STEPS,
    RingstowTrainer,
    adapters,
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


def copied(root, tmp_path):
    """Return a copy of a run's directory."""
    from shutil import copytree

    return copytree(root, tmp_path / "run")


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
        run = tmp_path / str(number)
        run.mkdir()
        resumed = fit(run, model=adapters(), resume=str(root / f"checkpoint-{step}"))
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
    (tmp_path / "run").mkdir()
    run = fit(tmp_path / "run", model=adapters(base, modules_to_save=None))
    path = tmp_path / "run" / f"checkpoint-{STEPS}"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(path)
    assert_same(loaded.state_dict(), run.model.state_dict())
    with_adapter = transformers.AutoModelForCausalLM.from_pretrained(path)
    row = {"input_ids": torch.arange(8).reshape(1, 8)}
    with torch.no_grad():
        assert_same(with_adapter(**row).logits, loaded.eval()(**row).logits)


def test_the_stock_trainer_resumes_the_adapter(tmp_path, ours):
    root = copied(ours[0], tmp_path)
    run = trainer(root, model=adapters(), kind=transformers.Trainer)
    run.train(resume_from_checkpoint=True)  # at its end already: it changes nothing
    assert run.state.global_step == STEPS
    assert_same(run.model.state_dict(), ours[1].model.state_dict())


def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    ends = []
    for kind in (RingstowTrainer, transformers.Trainer):
        root = tmp_path / kind.__name__
        root.mkdir()
        run = fit(
            root,
            model=adapters(),
            kind=kind,
            eval_strategy="steps",
            eval_steps=EVERY,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # the first is the best: it must outlive all others
        )
        assert checkpoints(root) == [f"checkpoint-{EVERY}"]
        ends.append(run.model.state_dict())
    assert_same(*ends)


def two_adapters():
    one = adapters()
    one.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    return one


def test_several_adapters_come_back_and_are_where_peft_puts_them(tmp_path):
    roots = {}
    for kind in (RingstowTrainer, transformers.Trainer):
        roots[kind] = tmp_path / kind.__name__
        roots[kind].mkdir()
        run = fit(roots[kind], model=two_adapters(), kind=kind)
    mine, theirs = (one / f"checkpoint-{STEPS}" for one in roots.values())
    for name in (*FILES, "other/adapter_config.json", "other/adapter_model.safetensors"):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    resumed = fit(
        roots[RingstowTrainer], model=two_adapters(), resume=str(mine.parent / "checkpoint-4")
    )
    assert_same(state(resumed), state(run))


def test_what_is_trained_beside_the_adapters_comes_back(tmp_path):
    def made():
        one = adapters()
        one.get_base_model().model.norm.weight.requires_grad_(True)
        return one

    expected = state(fit(tmp_path, model=made()))
    resumed = fit(tmp_path, model=made(), resume=str(tmp_path / "checkpoint-4"))
    assert_same(state(resumed), expected)


@pytest.mark.parametrize("reparameterized", [False, True])
def test_prompt_learning_resumes_to_the_bit(tmp_path, reparameterized):
    kind = peft.PromptEncoderConfig if reparameterized else peft.PromptTuningConfig
    options = {"encoder_hidden_size": 16} if reparameterized else {}

    def made():
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)
        return peft.get_peft_model(model(), config)

    run = fit(tmp_path, model=made())
    resumed = fit(tmp_path, model=made(), resume=str(tmp_path / "checkpoint-4"))
    assert_same(state(resumed), state(run))
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
    resumed = fit(tmp_path, model=made(), resume=str(tmp_path / "checkpoint-4"))
    ends = [{**state(one), "model": None} for one in (run, resumed)]
    assert_same(*ends)


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


def test_a_program_that_writes_over_peft_s_file_leaves_the_shards_whole(tmp_path, ours, stock):
    root = copied(ours[0], tmp_path)
    path = root / "checkpoint-4"
    file = path / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_file({name: one * 0 for name, one in load_file(file).items()}, file)
    assert ringstow.verify(path).ok
    assert_same(state(fit(root, model=adapters(), resume=str(path))), stock[1])


def test_slim_leaves_adapters_that_peft_opens(tmp_path, ours):
    path = copied(ours[0], tmp_path) / f"checkpoint-{STEPS}"
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
    root, results = tmp_path / "run", str(tmp_path / "results")
    options = {"has_adapters": True}
    assert (
        children.exit_code(processes.run, root, results, moment, number, options) == -signal.SIGKILL
    )
    assert checkpoints(root) == sorted(
        [f".ringstow-checkpoint-{3 * EVERY}", *(f"checkpoint-{n * EVERY}" for n in (1, 2))]
    )
    for name in ("checkpoint-2", "checkpoint-4"):
        assert set(FILES) <= set(os.listdir(root / name))
        peft.PeftModel.from_pretrained(model(), root / name)
    assert children.exit_code(processes.run, root, results, "", 0, options) == 0
    assert_same(torch.load(f"{results}.0"), stock[1])
