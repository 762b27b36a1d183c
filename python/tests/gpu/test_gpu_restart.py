"""A training on a real GPU that is started again: objects of a state, new optimizers, RNGs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringstow

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2).cuda(), capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def training(optimizer, *, sharded):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    model.cuda()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    return {
        "model": model,
        "optimizer": OPTIMIZERS[optimizer](model.parameters()),
        "rng": ringstow.RngState(),
    }


def steps(state, count):
    for _ in range(count):
        state["optimizer"].zero_grad()
        batch = torch.randn(16, 64, device="cuda")
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()


def learned(state):
    found = [p.detach() for p in state["model"].parameters()]
    for one in state["optimizer"].state.values():
        found += [one[name] for name in sorted(one)]
    return [one.to_local() if hasattr(one, "to_local") else one for one in found]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_on_a_gpu_that_is_started_again_equals_one_that_was_not_stopped(
    tmp_path, group, optimizer, sharded
):
    whole = training(optimizer, sharded=sharded)
    steps(whole, 3)
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, whole)
        steps(whole, 3)
        again = training(optimizer, sharded=sharded)
        assert manager.restore(into=again).step == 3
    steps(again, 3)
    for one, other in zip(learned(whole), learned(again), strict=True):
        assert one.device == other.device
        assert torch.equal(one, other)
