"""A tiny training with a manager: ``train.py ROOT RESULT`` resumes, and writes the last weights.

Every value that later steps depend on is in the state, so that a resumed training ends bit-equal.
"""

from __future__ import annotations

import sys

import torch

import ringstow

STEPS = 24
EVERY = 2
KEEP = 2

# Slow saves: a kill falls into one.
CONFIG = ringstow.Config(pool_bytes=1 << 20, block_bytes=16 << 10, queue_depth=1, fillers=1)


def main(root, result):
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    embedding = torch.nn.Embedding(1 << 13, 64)  # makes the checkpoint 7 MB with its moments
    optimizer = torch.optim.Adam([*model.parameters(), *embedding.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(11)
    first = 1
    with ringstow.CheckpointManager(root, keep=KEEP, config=CONFIG) as manager:
        restored = manager.restore()
        if restored is not None:
            model.load_state_dict(restored.state["model"])
            embedding.load_state_dict(restored.state["embedding"])
            optimizer.load_state_dict(restored.state["optimizer"])
            generator.set_state(restored.state["generator"])
            first = restored.step + 1
        for step in range(first, STEPS + 1):
            tokens = torch.randint(1 << 13, (16,), generator=generator)
            batch = embedding(tokens)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                state = {
                    "model": model.state_dict(),
                    "embedding": embedding.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "generator": generator.get_state(),
                }
                manager.save_async(step, state, metrics={"loss": loss.item()})
    torch.save([model.state_dict(), embedding.state_dict(), optimizer.state_dict()], result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
