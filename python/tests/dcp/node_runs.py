"""What tests of nodes that share no directory run on each rank: each rank's node is a folder."""

from __future__ import annotations

import torch
from layouts import EVEN_HIDDEN, whole
from test_distributed import state_of

import ringstow
from ringstow.distributed import PerRank


def root_on(root, rank):
    return root / f"node{rank}" / "run"


def manager_on(rank, root, *, replicas=1, **options):
    nodes = ringstow.Nodes(replicas=replicas)
    return ringstow.CheckpointManager(root_on(root, rank), nodes=nodes, **options)


def train(rank, root, steps, options):
    """Save steps; return what the last one saved."""
    model, optimizer, state = state_of("fsdp2", steps[-1], 0, EVEN_HIDDEN)
    with manager_on(rank, root, **options) as manager:
        for step in steps:
            state |= {"step": step, "own": PerRank(torch.full((5000,), step + rank))}
            manager.save_async(step, state, metrics={"loss": 1 / step})
            # Otherwise newer steps overtake it, and it stays as the last one with all copies.
            manager.wait_promoted()
        assert manager.wait_promoted()
        assert manager.promotion_error is None
    return whole(model, optimizer)


def train_own(rank, root, steps, options):
    with manager_on(rank, root, **options) as manager:
        for step in steps:
            manager.save(step, {"own": PerRank(torch.full((5,), float(step)))})
        assert manager.wait_promoted()


def saved_and_copied(rank, root, **options):
    """Save one step, whose copies fail at first; return how the last one ended."""
    with manager_on(rank, root, **options) as manager:
        manager.save(1, {"own": PerRank(torch.full((1000,), rank))})
        while not manager.wait_promoted(60):
            pass
        return manager.promotion_error
