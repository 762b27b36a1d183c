"""One small model, distributed over the ranks in every way that trainers use."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringstow.dcp

# No world size here divides 13 or 7 rows: the last ranks have fewer rows, or none.
INPUT, HIDDEN, OUTPUT = 6, 13, 7
# Tensor parallelism divides evenly.
EVEN_HIDDEN = 12


class Model(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(INPUT, hidden)
        self.second = nn.Linear(hidden, OUTPUT)
        self.register_buffer("calls", torch.tensor(3))

    def forward(self, x):
        return self.second(self.first(x).relu())


def plain(model):
    return model


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return fully_shard(model, mesh=mesh)


def tp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def fsdp2_tp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])


LAYOUTS = {f.__name__: f for f in (plain, fsdp1, fsdp2, hsdp, tp, fsdp2_tp)}


def trained(layout, hidden, seed):
    """Return a model in a layout and its optimizer, after one step, so that it has moments."""
    torch.manual_seed(seed)
    model = LAYOUTS[layout](Model(hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)  # the same batch on every rank
    model(torch.randn(5, INPUT)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(model, optimizer):
    """Return the full state on rank 0, to compare with.

    It does not use torch's full_state_dict, which mixes up the moments with FSDP1 on the CPU.
    """
    return [_whole(part) for part in get_state_dict(model, optimizer)]


def _whole(value):
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        return out
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return value


def save(rank, layout, path, hidden=HIDDEN, writer=None, **options):
    """Save a trained model; return its full state from rank 0."""
    model, optimizer = trained(layout, hidden, seed=1)
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optim": parts[1], "step": 7}
    dcp.save(state, storage_writer=writer or ringstow.dcp.StorageWriter(path), **options)
    state = whole(model, optimizer)
    return state if rank == 0 else None


def load(rank, layout, path, hidden=HIDDEN, reader=None, planner=None):
    """Load into a model with other weights; return its full state from rank 0."""
    model, optimizer = trained(layout, hidden, seed=2)
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optim": parts[1], "step": 0}
    dcp.load(state, storage_reader=reader or ringstow.dcp.StorageReader(path), planner=planner)
    assert state["step"] == (7 if planner is None else 0)
    state = filled(model, optimizer, state)
    return state if rank == 0 else None


def filled(model, optimizer, state):
    """Give a model and its optimizer their parts of a state; return the full state on rank 0."""
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
    set_state_dict(model, optimizer, **parts)
    return whole(model, optimizer)


def differences(one, other, path=""):
    """Return the names of values that are not bit-identical in two states."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(one.keys() ^ other.keys(), key=str)}"]
        return [d for k in one for d in differences(one[k], other[k], f"{path}.{k}")]
    elif isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return [d for n, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}.{n}")]
    else:
        same = one == other
    return [] if same else [path]
