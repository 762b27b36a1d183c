"""Trains a small language model and checkpoints it with ringstow, so that a kill costs no more
than the steps since the last save and changes no later loss by a single bit.

    python examples/train_torch.py --out run              # start (or start again) from step 0
    python examples/train_torch.py --out run --resume     # go on from the newest checkpoint

The pattern for your own trainer is in `train()`:
  1. `save_async` returns while the save runs. The next forward and backward pass overlap with it,
     and `optimizer.step()` waits until it has copied the weights.
  2. `result` of one save before the next raises what went wrong in the background.
  3. `retain` after it, with --keep, removes old checkpoints; the next save writes over their files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ringstow
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = Path(__file__).parent / "data" / "paradise-lost.txt"
BYTES = 256  # the vocabulary: the text is read as bytes


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = qkv.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.feed(self.norm_feed(x))
        return out


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes. Input and output embedding are one tensor (tied)."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        position = self.position(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + position)))
        return logits


class Sampler:
    """Random windows of the text, from a generator of its own: its state is checkpointed too."""

    def __init__(self, text: Tensor, batch: int, context: int, seed: int) -> None:
        self.text, self.batch, self.context = text, batch, context
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        last = len(self.text) - self.context - 1
        starts = torch.randint(last, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class Trainer:
    """All that training needs to go on: model, optimizer, step, both random generators."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.step = 0
        self.sampler = Sampler(text, args.batch, args.context, args.seed)
        self.model = LanguageModel(args.width, args.layers, args.heads, args.context, args.dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "sampler": self.sampler.generator.get_state()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])
        self.sampler.generator.set_state(state["rng"]["sampler"])

    def backward(self) -> float:
        """Forward and backward pass of the next step: reads the weights, leaves them alone."""
        tokens, targets = self.sampler.next()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()


class LossLog:
    """One JSON line a step. Resuming forgets the steps that came after the checkpoint."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        old = path.read_text().splitlines() if path.exists() else []
        keep = old[:keep_until_step]  # line n is step n + 1; a kill can only tear a later line
        path.write_text("".join(line + "\n" for line in keep))
        self.file = path.open("a")

    def add(self, step: int, loss: float) -> None:
        self.file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self.file.flush()


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(args)
    newest = ringstow.latest(args.out) if args.resume else None
    if newest is not None:
        trainer.restore(ringstow.load(newest))
        print(f"resumed from {Path(newest.path).name}", flush=True)
    log = LossLog(args.out / "losses.jsonl", keep_until_step=trainer.step)

    save: ringstow.SaveHandle | None = None
    while trainer.step < args.steps:
        loss = trainer.backward()
        trainer.optimizer.step()  # waits until a save has copied what this changes
        trainer.step += 1
        log.add(trainer.step, loss)
        if trainer.step % args.save_every == 0 or trainer.step == args.steps:
            if save is not None:
                report(save)
                if args.keep:
                    ringstow.retain(args.out, args.keep, recycle=True)
            path = args.out / f"step-{trainer.step:08}"
            save = ringstow.save_async(trainer.state(), path, step=trainer.step)
        if trainer.step % 10 == 0:
            print(f"step {trainer.step:4}  loss {loss:.4f}", flush=True)
    if save is not None:
        report(save)
        if args.keep:
            ringstow.retain(args.out, args.keep, recycle=True)


def report(save: ringstow.SaveHandle) -> None:
    """Waits for a save to be committed; raises what went wrong, if anything did."""
    done = save.result()
    how = f"{done.engine}, {'direct' if done.direct else 'buffered'}"
    megabytes, seconds = done.tensor_bytes / 1e6, done.seconds.total
    name = Path(done.path).name
    print(f"  saved {name}: {megabytes:.1f} MB in {seconds:.3f} s ({how})", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer, checkpointing it.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and losses go here")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep", type=int, default=0, help="checkpoints that stay; 0: all of them")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1667)
    parser.add_argument("--threads", type=int, default=2, help="fixed: it decides rounding")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    train(args)
