"""Small models of Hugging Face's, and Trainers for one."""

from __future__ import annotations

import inspect
import os
import warnings

import torch
import transformers

from ringstow.integrations.transformers import RingstowTrainer

STEPS = 8
EVERY = 2  # steps between two saves

torch.set_num_threads(1)  # for so small a model threads only wait for each other


class Rows(torch.utils.data.Dataset):
    """Sixteen rows of tokens."""

    def __len__(self):
        return 16

    def __getitem__(self, number):
        chance = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (8,), generator=chance)
        return {"input_ids": tokens, "labels": tokens}


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
        attention_dropout=0.1,  # so that equal ends need equal random numbers
    )
    return transformers.LlamaForCausalLM(config)


TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def mixtral():
    """Return the configuration of a tiny model with experts."""
    return transformers.MixtralConfig(**TINY, num_local_experts=12)


def qwen2_moe():
    """Return the configuration of a tiny model with experts, of which tokens share one."""
    own = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return transformers.Qwen2MoeConfig(**TINY, num_experts=12, **own)


def arguments(root, **options):
    return transformers.TrainingArguments(
        **{
            "output_dir": str(root),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "save_steps": EVERY,
            "logging_steps": EVERY,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "learning_rate": 1e-2,
            **options,
        }
    )


def adapters(base=None, **options):
    """Return a PeftModel of the small model."""
    import peft

    chosen = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], **options}
    base = base or model()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lm_head is tied
        return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, **chosen))


BEST = {"eval_strategy": "steps", "eval_steps": EVERY, "metric_for_best_model": "eval_loss"}
# The first is the best: it must outlive all others.
FIRST_IS_BEST = {**BEST, "greater_is_better": True, "save_total_limit": 1}


def trainer(
    root, *, kind=RingstowTrainer, callbacks=(), model=model, arguments=arguments, **options
):
    return kind(
        model=model() if inspect.isfunction(model) else model,
        args=arguments(root, **options),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=list(callbacks),
    )


def fit(root, *, resume=None, **options):
    """Train to the end, from the newest checkpoint if there is one."""
    os.makedirs(root, exist_ok=True)
    if resume is None:
        resume = any(name.startswith("checkpoint-") for name in os.listdir(root))
    run = trainer(root, **options)
    run.train(resume_from_checkpoint=resume or None)
    return run


def both(at, program=fit, **options):
    """Train with ringstow's Trainer and the stock one; yield each one's directory and its run."""
    for kind in (RingstowTrainer, transformers.Trainer):
        root = at / kind.__name__
        yield root, program(root, kind=kind, **options)


def state(run):
    """Return what two runs must have equal at their end."""
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.lr_scheduler.state_dict(),
        "random": torch.random.get_rng_state(),
        "step": run.state.global_step,
        "losses": [row["loss"] for row in run.state.log_history if "loss" in row],
    }


def checkpoints(root):
    return sorted(name for name in os.listdir(root))
