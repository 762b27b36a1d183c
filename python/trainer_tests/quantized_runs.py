"""Training runs with quantized weights and optimizers, by torchao, bitsandbytes and others."""

from __future__ import annotations

import itertools
import sys
import warnings

import bitsandbytes
import children
import pytorch_optimizer
import schedulefree
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchao.optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import (
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_

import ringstow
import ringstow.dcp
import ringstow.distributed

children.preload(__name__)
torch.compiler.set_stance("force_eager")  # torchao compiles its optimizers, which takes seconds
BEFORE, AFTER = 3, 2  # steps before and after the save


def _of_bitsandbytes(name):
    # bitsandbytes keeps small states in 32 bits.
    return lambda params: getattr(bitsandbytes.optim, name)(params, lr=1e-3, min_8bit_size=1)


def _schedule_free(params):
    optimizer = schedulefree.AdamWScheduleFree(params)
    optimizer.train()
    return optimizer


OPTIMIZERS = {
    "torchao AdamW8bit": lambda params: torchao.optim.AdamW8bit(params, lr=1e-3),
    "torchao AdamW4bit": lambda params: torchao.optim.AdamW4bit(params, lr=1e-3),
    "torchao AdamWFp8": lambda params: torchao.optim.AdamWFp8(params, lr=1e-3),
    **{
        f"bitsandbytes {name}": _of_bitsandbytes(name)
        for name in ("AdamW8bit", "Lion8bit", "PagedAdamW8bit", "AdEMAMix8bit")
    },
    "torch Muon": lambda params: torch.optim.Muon([one for one in params if one.dim() == 2]),
    "schedule-free AdamW": _schedule_free,
    "Shampoo": lambda params: pytorch_optimizer.Shampoo(params),
    "SOAP": lambda params: pytorch_optimizer.SOAP(params),
}

# How weights are quantized for training, and the optimizer.
MODELS = {
    "int8": (
        lambda model: quantize_(model, int8_weight_only_quantized_training()),
        OPTIMIZERS["torchao AdamW8bit"],
    ),
    "int8 mixed precision": (
        lambda model: quantize_(model, int8_mixed_precision_training()),
        torch.optim.AdamW,
    ),
    "float8": (
        lambda model: convert_to_float8_training(
            model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        ),
        torch.optim.AdamW,
    ),
    **{
        name: (lambda model: model, OPTIMIZERS[name])
        for name in OPTIMIZERS
        if name.startswith("torchao")
    },
}


def model_of():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    return torch.nn.Sequential(*layers)


def train(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(kind):
    quantize, optimizer_of = MODELS[kind]
    model = model_of()
    quantize(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model.parameters())


def parts(tensor):
    """Return the plain tensors that this rank has of a tensor."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach().clone()]
    return [one for name in tensor.__tensor_flatten__()[0] for one in parts(getattr(tensor, name))]


def by_dcp(kind, saved, path):
    """Save by torch.distributed.checkpoint, and load into a model that has learned other things."""
    other = sharded(kind)
    train(*other, range(1))
    states = [
        {"model": one.state_dict(), "optimizer": two.state_dict()} for one, two in (saved, other)
    ]
    dcp.save(states[0], checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter())
    dcp.load(states[1], checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())
    other[1].load_state_dict(states[1]["optimizer"])
    for step in (0, 1):  # what was loaded, and what is learned from it
        pairs = [[parts(p) for p in one.parameters()] for one, _ in (saved, other)]
        assert all(
            one.equal(two) for one, two in zip(*(itertools.chain(*p) for p in pairs), strict=True)
        )
        for one in (saved, other):
            torch.manual_seed(step)
            train(*one, range(BEFORE, BEFORE + 1))


def as_rank(rank, count, kind, act, path, learned):
    """Train on ranks and save; or load, train on, and compare; or load and save again.

    Or load, save by DCP, and load that into what another training has; or load and export.
    """
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, optimizer = sharded(kind)
    # int8 weights are rounded at random.
    state = {"model": model, "optimizer": optimizer, "rng": ringstow.RngState()}
    if act == "save":
        train(model, optimizer, range(BEFORE))
        ringstow.distributed.save_async(state, path).result()
    else:
        ringstow.distributed.load_into(state, path)
    if act == "dcp":
        by_dcp(kind, (model, optimizer), learned)
    elif act == "export":
        ringstow.dcp.export_hf(model.state_dict(), learned, dequantize=True)
    elif act == "again":
        ringstow.distributed.save(state, learned)
    else:
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        found = [parts(one) for one in model.parameters()]
        if act == "save":
            torch.save(found, f"{learned}-{rank}")
        else:
            wanted = torch.load(f"{learned}-{rank}")
            pairs = zip(*(itertools.chain(*one) for one in (found, wanted)), strict=True)
            assert all(one.equal(other) for one, other in pairs), (rank, kind)
    dist.destroy_process_group()


def crash(name, path):
    """Train in a process that dies after its save; return nothing."""
    model = model_of()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, range(BEFORE))
    ringstow.save({"model": model, "optimizer": optimizer}, path)
    sys.stdout.flush()
    children.die()
