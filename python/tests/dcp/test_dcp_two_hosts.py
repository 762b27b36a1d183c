"""DCP by two ranks on two hosts, which see late what the other one has done."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from operations import RANKS, SMALL, join, state, step_of

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow._ranks import _shared_fs_lag

STEPS = range(1, 5)
# Requests for which a host repeats an answer, at most. A rank that waits makes many.
STALE = 2000


def saved(rank, step, path):
    """Save a step, each rank a part of it."""
    share = {n: t for i, (n, t) in enumerate(state(step).items()) if i % RANKS == rank}
    dcp.save(share, storage_writer=ringstow.dcp.StorageWriter(path, config=SMALL))


def loaded(path):
    """Load all of a checkpoint, and return its step; every element is compared."""
    found = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    dcp.load(found, storage_reader=ringstow.dcp.StorageReader(path, config=SMALL))
    return step_of(found)


def look_around(root):
    """Let this host remember that no step is there yet."""
    return [path.exists() for step in STEPS for path in (root / "run", root / "run" / f"{step}")]


def train(root, rank, store):
    """Save steps, and after each load the newest; return the steps, and what this host saw."""
    _shared_fs_lag.POLL_S = 0.0
    _native.look_at_once()
    join(rank, RANKS, store)
    look_around(root)
    found, alone = [], []
    for step in STEPS:
        saved(rank, step, root / "run" / f"step-{step}")
        newest = ringstow.latest(root / "run")
        alone.append(None if newest is None else newest.step)
        newest = ringstow.dcp.latest(root / "run")
        assert newest.path == str(root / "run" / f"step-{step}")
        found.append(loaded(newest))
        if rank == 0:
            ringstow.retain(root / "run", keep=2)
        dist.barrier()
    return found, alone


def outcomes_of(share, function, *args):
    """Run a function on both hosts, one rank each; return what they return."""
    outcomes = share.run(*((function, rank, *args) for rank in range(RANKS)))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def test_ranks_resume_from_the_step_that_was_saved_last(two_hosts, tmp_path):
    with two_hosts(1) as share:
        share.set_rules(1, stale_requests=STALE)
        first, second = outcomes_of(share, train, tmp_path / "store")
        assert first == ([*STEPS], [*STEPS])
        assert second[0] == [*STEPS]
        assert second[1] != [*STEPS], "this host saw all at once: it tests nothing"
        share.refresh()
        names = share.alone(1, names_in, "run")
    assert names == ["step-3", "step-4"]


def names_in(root, name):
    return sorted(path.name for path in (root / name).iterdir())


def save_over(root, rank, store):
    """Save to one path again and again; return what is loaded after each."""
    _shared_fs_lag.POLL_S = 0.0
    _native.look_at_once()
    join(rank, RANKS, store)
    found = []
    for step in STEPS:
        saved(rank, step, root / "last")
        found.append(loaded(root / "last"))
        dist.barrier()
    return found


@pytest.mark.parametrize("stale", [0, STALE])
def test_ranks_load_what_was_saved_over_an_older_checkpoint(two_hosts, tmp_path, stale):
    with two_hosts(2) as share:
        for host in range(2):
            share.set_rules(host, stale_requests=stale, direct=host == 0)
        assert outcomes_of(share, save_over, tmp_path / "store") == [[*STEPS]] * RANKS
        share.refresh()
        left = share.alone(0, names_in, "last")
    assert not [name for name in left if name.endswith(".part")], left
