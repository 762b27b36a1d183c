"""A kill of one rank, or of all, at any moment leaves a sharded checkpoint that Lightning takes."""

from __future__ import annotations

import os
import signal

import children
import lightning_shards as shards
import pytest
import torch
from lightning_shards import EVERY
from support import assert_same

import ringstow

pytestmark = pytest.mark.timeout(300)  # four or more processes, each of them a whole run

# The kind; the moment; of which save, from 1; which ranks. The first save is awaited.
MOMENTS = [
    ("mp", "writing", 1, (0, 1)),
    ("mp", "writing", 3, (1,)),
    ("mp", "training", 3, (0, 1)),
    ("mp", "training", 3, (0,)),
    ("mp", "written", 3, (1,)),
    ("mp", "committing", 3, (0,)),
    ("mp", "committed", 3, (0,)),
    ("mp", "removing", 2, (0,)),
    ("mp", "naming", 1, (0,)),
    ("fsdp", "training", 3, (1,)),
    ("fsdp", "committing", 3, (0,)),
]


def killed(rank, ranks, kind, root, moment, number, victims):
    """Train, and be killed at a moment of one of the saves."""
    from lightning_processes import Batches, die

    from ringstow.dcp import _mark
    from ringstow.distributed import _commit, _save
    from ringstow.integrations._lightning import _paths, _ranks

    batches, count = Batches(), 0
    meet = _save._Save._meet
    start = _ranks.Ranks.save_async
    write, finish = _save._Save._write_share, _commit.Shared._commit

    def begin(self):
        nonlocal count
        count += 1
        return meet(self)

    def save_async(*args, **more):  # in training's thread: no batch begins meanwhile
        batches.has_begun.clear()
        return start(*args, **more)

    def is_now(*moments):
        return count == number and rank in victims and moment in moments

    def write_share(self, state):
        if is_now("training"):
            assert batches.has_begun.wait(300)
        if is_now("writing", "training"):
            die()
        done = write(self, state)
        if is_now("written"):
            die()
        return done

    def commit(self, *args, **more):
        return die() if is_now("committing") else finish(self, *args, **more)

    def after(moment, function):
        return lambda *args, **more: die() if is_now(moment) else function(*args, **more)

    _ranks.Ranks.save_async = save_async
    _save._Save._meet = begin
    _save._Save._write_share = write_share
    _commit.Shared._commit = commit
    _mark.write = after("committed", _mark.write)
    _paths.remove = after("removing", _paths.remove)
    _paths.put = after("naming", _paths.put)
    shards.run(kind, ranks, root, batches).fit(shards.model())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return what runs of each kind learn that are not killed."""
    at = tmp_path_factory.mktemp("unbroken")
    learned = {}
    for kind in ("mp", "fsdp"):
        results = at / f"{kind}.pt"
        assert children.exit_codes(2, shards.fit, f"stock-{kind}", at / kind, results) == [
            0,
            0,
        ]
        learned[kind] = torch.load(results)
        assert learned[kind].pop("begun") == 0
    return learned


@pytest.mark.parametrize(("kind", "moment", "number", "victims"), MOMENTS)
def test_a_killed_sharded_run_resumes_to_the_bit(kind, moment, number, victims, tmp_path, unbroken):
    root, results = tmp_path / "run", tmp_path / "results.pt"
    codes = children.exit_codes(2, killed, kind, root, moment, number, victims)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    is_committed = moment in ("committed", "removing")
    at_least = (number if is_committed else number - 1) * EVERY
    found = ringstow.latest(root) if os.path.isdir(root) else None
    if at_least:
        assert ringstow.verify(found).ok
        assert ringstow.load(found)["lightning"][0]["global_step"] >= at_least
    else:
        assert found is None or moment == "naming"
    checkpoint = None if found is None else "latest"
    assert children.exit_codes(2, shards.fit, kind, root, results, checkpoint) == [0, 0]
    learned = torch.load(results)
    assert learned.pop("begun") >= at_least
    assert_same(learned, unbroken[kind])
    kept = [name for name in os.listdir(root) if not name.startswith(".")]
    newest = ringstow.latest(root)
    assert os.path.basename(newest) in kept
    assert ringstow.load(newest)["lightning"][0]["global_step"] == shards.STEPS
