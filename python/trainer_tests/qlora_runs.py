"""Trainings of adapters on a base of 4-bit weights, as QLoRA does, and of 8-bit layers."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import warnings

import bitsandbytes
import children
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers_runs import adapters, model

import ringstow
import ringstow.dcp
import ringstow.distributed
from ringstow.integrations import bitsandbytes as bitsandbytes_of

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


def sharded(seed):
    """Return a 4-bit layer that FSDP2 shards, and a layer to train."""
    torch.manual_seed(seed)
    first = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", quant_storage=torch.float32)
    made = torch.nn.Sequential(first, torch.nn.Linear(64, 8)).to("cpu")
    return fully_shard(made, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def as_rank(rank, count, act, path):
    """Save such a model, or load it into another one; compare what they compute."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    made, rows = sharded(seed=0), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    if act == "save":
        ringstow.distributed.save({"model": made}, path)
    else:
        bitsandbytes_of.use(made)
        with contextlib.suppress(ringstow.UnsupportedError):
            ringstow.dcp.export_hf(made.state_dict(), f"{path}-hf", dequantize=True)
            raise AssertionError("codes in shards were exported")
        other = sharded(seed=5)
        assert not other(rows).equal(made(rows))
        ringstow.distributed.load_into({"model": other}, path)
        assert other(rows).equal(made(rows))
    dist.destroy_process_group()


def four_bits(*shape, bias=False, kind="nf4"):
    """Return a layer of 4-bit weights, which its first move quantizes."""
    layer = bitsandbytes.nn.Linear4bit(*shape, bias=bias, quant_type=kind)
    return torch.nn.Sequential(layer)


def eight_bits(seed):
    """Return a layer of 8-bit weights."""
    torch.manual_seed(seed)
    layer = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    return torch.nn.Sequential(layer).to("cpu")
