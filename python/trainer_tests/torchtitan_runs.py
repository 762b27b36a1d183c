# ruff: noqa: E402 (the device has to be set first)
"""torchtitan's own Trainer with a tiny Llama, on CPUs.

torchtitan is made for GPUs. This module replaces what does not run without one: the device module,
compiled attention, and a reduction that gloo lacks. The training loop, the model, FSDP2, the
optimizer, the data loader, and what the loop calls of a checkpoint manager are torchtitan's.
"""

from __future__ import annotations

import json
import os
import types

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

CPU = types.SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
    set_device=lambda device: None,
    synchronize=lambda device=None: None,
)
# Before any other module takes these names.
utils.device_type, utils.device_module = "cpu", CPU

import datasets
import torchtitan.trainer
from torchtitan.components.checkpointer import CheckpointManager as Stock
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models import llama3
from torchtitan.models.common import attention
from torchtitan.trainer import Trainer

from ringstow.integrations.torchtitan import CheckpointManager

MANAGERS = {"ringstow": CheckpointManager, "stock": Stock}
STEPS = 4
EVERY = 1  # steps between two saves
WORDS = 64
WIDTH = 192  # a weight is larger than what a background save copies at the call
LENGTH = 16  # tokens in a row


def _dense(q, k, v, *, enable_gqa, **_):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
    return out, types.SimpleNamespace(lse=None)


attention.FlexAttention._compiled_flex_attn = staticmethod(_dense)
attention._compiled_create_block_mask = attention.create_block_mask
torchtitan.trainer.time = types.SimpleNamespace(
    perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda seconds: None
)


def _rows(path):
    chance = torch.Generator().manual_seed(7)
    numbers = torch.randint(2, WORDS, (64, 40), generator=chance).tolist()
    return datasets.Dataset.from_list([{"text": " ".join(f"w{n}" for n in row)} for row in numbers])


text_datasets.DATASETS["rows"] = DatasetConfig(
    path="", loader=_rows, sample_processor=lambda row: row["text"]
)


def write_tokenizer(folder):
    """Write a tokenizer that knows the words of `_rows`."""
    os.makedirs(folder, exist_ok=True)
    words = {"<bos>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, WORDS)}}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": word, "special": True, **special}
            for n, word in enumerate(("<bos>", "<eos>"))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<eos>"},
    }
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": "<eos>"},
    }
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file)


def model_spec():
    spec = llama3.model_registry("debugmodel")
    rope = llama3.ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=64, theta=10000, scaling="llama")
    spec.model.dim, spec.model.vocab_size = WIDTH, WORDS
    spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = WORDS
    spec.model.tok_embeddings.embedding_dim = spec.model.lm_head.in_features = WIDTH
    spec.model.norm.normalized_shape = WIDTH
    spec.model.layers = llama3._build_llama3_layers(
        n_layers=1, dim=WIDTH, n_heads=2, hidden_dim=WIDTH, rope=rope, attn_backend="flex"
    )
    return spec


def config(root, checkpoint, *, steps=STEPS):
    """Return a run's configuration: what a user of torchtitan writes."""
    tokenizer = os.path.join(root, "tokenizer")
    if not os.path.exists(tokenizer):
        write_tokenizer(tokenizer)
    return Trainer.Config(
        model_spec=model_spec(),
        hf_assets_path=tokenizer,
        dump_folder=os.fspath(root),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=steps, disable_cuda_graphs=True
        ),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="rows"),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="1F1B"),
        checkpoint=checkpoint,
        activation_checkpoint=None,
    )


def trainer(root, checkpoint, *, steps=STEPS):
    """Return torchtitan's Trainer of a run."""
    run = config(root, checkpoint, steps=steps).build()
    for part in run.model_parts[0].modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return run


def settings(manager="ringstow", **options):
    """Return a checkpoint manager's configuration."""
    chosen = {"enable": True, "interval": EVERY, "last_save_model_only": False, **options}
    return MANAGERS[manager].Config(**chosen)


def whole(run):
    """Return all that a run has learned, in whole tensors, and what it goes on with."""
    from torch.distributed.tensor import DTensor

    def full(state):
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}

    return {
        "model": full(run.model_parts[0].state_dict()),
        "optimizer": full(run.optimizers.state_dict()),
        "schedule": run.lr_schedulers.state_dict(),
        "train": run.state_dict(),
        "data": run.dataloader.state_dict(),
    }


def fit(rank, ranks, root, *, manager="ringstow", steps=STEPS, **checkpoint):
    """Train to the end, from what the manager loads; return where it began, and the end."""
    run = trainer(root, settings(manager, **checkpoint), steps=steps)
    begun = []
    load = run.checkpointer.load

    def loading(step):
        loaded = load(step)
        begun.append(run.step)
        return loaded

    run.checkpointer.load = loading
    try:
        run.train()
    finally:
        run.close()
    return begun[0], whole(run)
