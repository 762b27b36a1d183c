"""Checkpoints of several ranks without torch.distributed.checkpoint: plain `ringstow.save`.

    torchrun --nproc-per-node 2 examples/train_torchrun.py --out run                # rank 0 saves
    torchrun --nproc-per-node 2 examples/train_torchrun.py --out run --each         # each its own
    torchrun --nproc-per-node 2 examples/train_torchrun.py --out run --resume --steps 12
    ... --background saves while training goes on

Two patterns:
  rank 0 saves   every rank has the same model (DDP): one of them saves it, the others go on.
  each its own   every rank has a state of its own: rank r saves to OUT/rank-r/step-N. A step can be
                 resumed if all ranks have it, so the ranks agree on the newest one that they share.

Where the ranks meet: before a resume, to agree on the step; after the last save, since a rank that
leaves early can take the job's others with it. No save needs a barrier of its own.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import ringstow
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """A model that every rank has, and a generator that every rank has for itself."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(1667)
        self.step = 0
        self.module = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.width = width
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def backward(self) -> float:
        batch = torch.randn(8, self.width, generator=self.generator)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(batch), batch)
        loss.backward()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        self.step = state["step"]
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if own:
            self.generator.set_state(state["generator"])
        else:  # rank 0's generator is not this rank's: start a stream of its own for this step
            self.generator.manual_seed(self.step * 1000 + dist.get_rank())


def agreed_step(own: Path) -> int:
    """The newest step that every rank has. Saves are in order, so it is the least of the newest."""
    newest = ringstow.latest(own)
    step = torch.tensor((newest.step or 0) if newest is not None else 0)
    dist.all_reduce(step, dist.ReduceOp.MIN)
    return int(step.item())


def say(text: str) -> None:
    """Print a line, in one piece and with this rank's number."""
    print(f"[rank {dist.get_rank()}] {text}\n", end="", flush=True)


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    # Rank 0's directory is everybody's where rank 0 saves.
    out = args.out / f"rank-{rank if args.each else 0:05}"
    trainer = Trainer(args.width)
    if args.resume and (step := agreed_step(out)) > 0:
        trainer.restore(ringstow.load(out / f"step-{step:08}"), own=args.each or rank == 0)
        say(f"resumed step {trainer.step}")

    saves = args.each or rank == 0
    pending: ringstow.SaveHandle | None = None
    while trainer.step < args.steps:
        loss = trainer.backward()
        trainer.optimizer.step()  # waits until a save has copied what this changes
        trainer.step += 1
        say(f"step {trainer.step} loss {loss:.9f}")
        if saves and trainer.step % args.save_every == 0:
            if pending is not None:
                pending.result()  # raises what went wrong
            pending = ringstow.save_async(trainer.state(), out / f"step-{trainer.step:08}")
            if not args.background:
                pending.result()
    if pending is not None:
        pending.result()
    dist.barrier()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on several ranks, checkpointing the model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints go here")
    parser.add_argument("--each", action="store_true", help="each rank saves its own state")
    parser.add_argument("--background", action="store_true", help="save while training goes on")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(arguments())
    gc.collect()  # DistributedDataParallel holds on to the group, in a cycle
    dist.destroy_process_group()
