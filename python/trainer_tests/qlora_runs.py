"""Trainings of adapters on a base of 4-bit weights, as QLoRA does, and of 8-bit layers."""

from __future__ import annotations

import functools
import sys
import tempfile

import bitsandbytes
import children
import torch
import transformers
from transformers_runs import adapters, model

import ringstow

children.preload(__name__)
BEFORE, AFTER = 3, 2  # steps before and after the save


@functools.cache
def _saved(seed):
    """Return a directory with the small model, whose weights this seed has changed."""
    base = model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in base.parameters():
            one.add_(torch.randn(one.shape, generator=generator), alpha=0.02)
    path = tempfile.mkdtemp()
    base.save_pretrained(path)
    return path


def base(seed=0, path=None, **options):
    """Return a model whose linear layers are quantized to 4 bits, twice."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        path or _saved(seed), quantization_config=config, dtype=torch.float32
    )


def lora(seed=0):
    """Return a PeftModel of such a base, and its optimizer."""
    made = adapters(base(seed)).train()
    return made, torch.optim.AdamW([one for one in made.parameters() if one.requires_grad], lr=0.01)


def train(made, optimizer, steps):
    for step in steps:
        rows = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        made(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(made, optimizer):
    return {"model": made, "optimizer": optimizer, "rng": ringstow.RngState()}


def crash(path):
    """Train in a process that dies after its save; return nothing."""
    torch.manual_seed(2)
    made, optimizer = lora()
    train(made, optimizer, range(BEFORE))
    with ringstow.CheckpointManager(path) as manager:
        manager.save_async(BEFORE, state_of(made, optimizer)).result()
        sys.stdout.flush()
        children.die()


def four_bits(*shape):
    """Return a layer of 4-bit weights, which its first move quantizes."""
    layer = bitsandbytes.nn.Linear4bit(*shape, bias=False, quant_type="nf4")
    return torch.nn.Sequential(layer)


def eight_bits(seed):
    """Return a layer of 8-bit weights."""
    torch.manual_seed(seed)
    layer = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    return torch.nn.Sequential(layer).to("cpu")
