"""What the examples here share: a small model, sharded over the ranks by FSDP2, and its training.

Runs on CPU (gloo) or, where every rank has one, on CUDA (nccl). Nothing here knows of a checkpoint
library: `state()` is what `torch.distributed.checkpoint` asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    import ringstow
from torch.distributed.fsdp import fully_shard


def set_up() -> torch.device:
    """Join the other ranks, which torchrun has started; returns this rank's device."""
    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() > rank:
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return torch.device("cuda", rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


class Trainer:
    """A model, its optimizer, and one synthetic batch a step."""

    def __init__(self, device: torch.device, width: int) -> None:
        torch.manual_seed(1667)
        self.device, self.width = device, width
        self.step = 0
        self.model = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.model.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self) -> float:
        """Forward and backward pass of the next step: reads the weights, leaves them alone."""
        generator = torch.Generator().manual_seed(self.step * 1000 + dist.get_rank())
        batch = torch.randn(8, self.width, generator=generator).to(self.device)
        loss = F.mse_loss(self.model(batch), batch)
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """The optimizer's step: from here on the weights are others."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """All that training needs to go on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def digest(state: dict[str, Any]) -> str:
    """A short name for this rank's bytes of a state: equal only if every one of them is."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            raw = local.detach().cpu().contiguous().flatten().view(torch.uint8)
            hasher.update(raw.numpy().tobytes())
        else:
            hasher.update(repr(value).encode())

    add(state)
    return hasher.hexdigest()[:16]


def newest(out: Path) -> ringstow.Step | None:
    """The newest complete checkpoint: rank 0 looks, so that all ranks go by the same answer."""
    import ringstow.dcp

    return ringstow.dcp.latest(out)


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of every example here."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints go here")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--stock", action="store_true", help="with PyTorch's own writer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    return parser.parse_args()


def say(text: str) -> None:
    """Print a line, in one piece and with this rank's number."""
    print(f"[rank {dist.get_rank()}] {text}\n", end="", flush=True)
