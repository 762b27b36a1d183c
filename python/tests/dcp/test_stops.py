"""Ranks that a signal stops save the same step, and the training goes on from it bit-equal.

`stops` is its program. More signals: `make torture-stops`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal

import forked
import pytest
from ranks import on_ranks, raised

import ringstow

HERE = pathlib.Path(__file__).parent
STOPS = int(os.environ.get("RINGSTOW_TEST_STOPS", "5"))
SEED = int(os.environ.get("RINGSTOW_SEED", "0"))
MOMENTS = ("step", "save", "promotion", "twice", "anytime")
# Of a training: it has that many lives, and one that ends it.
STOPS_EACH = len(MOMENTS)


@dataclasses.dataclass
class Life:
    """One start of the training."""

    number: int
    to: int = 0
    """The rank that gets the signal."""
    by: int = -1
    """The rank whose moment it is; -1 for no signal."""
    after: int = 0
    """After how many steps of this life."""
    moment: str = "step"
    times: int = 1
    later_s: float = 0.0
    """How long after the moment "anytime"."""
    grace: str | None = None
    every: str = ""
    beat_us: int = 1_000_000
    long_step_us: int = 1_000_000
    same_notice_s: float = 1000.0  # a slow machine needs longer from one signal to the next


def lives_of(seed, ranks, stops):
    """Return the lives that signals end, as a seed says."""
    dice = random.Random(seed)
    moments = list(MOMENTS)
    dice.shuffle(moments)
    for number, moment in zip(range(stops), moments, strict=False):
        yield Life(
            number,
            to=dice.randrange(ranks),
            # Only rank 0 copies.
            by=0 if moment == "promotion" else dice.randrange(ranks),
            after=dice.randrange(1, 20),
            moment="step" if moment == "twice" else moment,
            times=2 if moment == "twice" else 1,
            later_s=dice.uniform(0, 0.03),
            grace=dice.choice([None, "1h"]),
            every=dice.choice(["", "", "100ms"]),
            # Beats of 1 step, a few steps or many, or within each step.
            beat_us=dice.choice([1, 20_000, 1_000_000]),
            long_step_us=dice.choice([0, 1_000_000, 1_000_000]),
        )


def live(root, ranks, life):
    """Run one life in fresh processes; return how each rank ended."""
    words = [str(ranks), json.dumps(dataclasses.asdict(life))]
    started = [
        forked.Program(forked.SCRIPT, root, rank, *words, name=HERE / "stops.py")
        for rank in range(ranks)
    ]
    return [one.wait(timeout=500) for one in started]


def said(ended, word):
    """Return what each rank has printed after a word; all must have ended well."""
    texts = "\n".join(one.stdout + one.stderr for one in ended)
    assert [one.returncode for one in ended] == [0] * len(ended), texts
    lines = [line.split(" ", 1) for one in ended for line in one.stdout.splitlines()]
    return [rest for first, rest in lines if first == word]


def newest(root):
    found = ringstow.latest(root / "run")
    assert found is not None
    assert ringstow.verify(found.path).ok
    return found.step


@pytest.mark.timeout(3600)
def test_all_ranks_stop_at_the_same_step_and_go_on_bit_equal(tmp_path):
    left, seed = STOPS, SEED
    while left > 0:
        ranks = 2 + seed % 3
        root, other = tmp_path / f"{seed}", tmp_path / f"{seed}-never"
        for directory in (root, other):
            directory.mkdir()
        never = set(said(live(other, ranks, Life(0)), "digest"))
        number = 0
        for life in lives_of(seed, ranks, min(left, STOPS_EACH)):
            ends = said(live(root, ranks, life), "ended")
            assert len(set(ends)) == 1, (life, ends)
            step, is_stopping = json.loads(ends[0])
            assert (newest(root), is_stopping) == (step, True), life
            number = life.number + 1
        assert set(said(live(root, ranks, Life(number)), "digest")) == never
        left, seed = left - number, seed + 1
    print(
        f"promise: a signal to one rank stops all at the same saved step: {STOPS} signals, 0 broken"
    )


def test_the_second_signal_ends_a_rank_at_once_and_the_earlier_checkpoint_stays(tmp_path):
    first = Life(0, to=1, by=1, after=15, times=1, long_step_us=0)
    said(live(tmp_path, 2, first), "ended")
    before = newest(tmp_path)
    life = Life(1, to=1, by=1, after=1, times=2, same_notice_s=-1.0)
    ended = live(tmp_path, 2, life)
    assert ended[1].returncode == -signal.SIGTERM
    assert newest(tmp_path) == before


LEAVES = """
import os, sys, time
import torch.distributed as dist
import ringstow

root, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=2)
with ringstow.CheckpointManager(f"{root}/run", when=ringstow.OnSignal()) as manager:
    for step in range(3):
        manager.should_save(step)
    if rank == 1:
        manager.should_save(3)  # which the other rank never does
        assert manager._side.is_awaited
        raise ZeroDivisionError
    while not os.path.exists(f"{root}/gone"):
        time.sleep(0.01)
    manager.wait()
"""


def test_a_rank_that_raises_leaves_at_once_and_the_others_fail_at_their_next_call(tmp_path):
    one, other = (forked.Program(LEAVES, tmp_path, rank) for rank in range(2))
    ended = other.wait(timeout=500)
    assert (ended.returncode, "ZeroDivisionError" in ended.stderr) == (1, True), ended.stderr
    (tmp_path / "gone").touch()
    ended = one.wait(timeout=500)
    assert ended.returncode == 1
    assert "another rank has ended, or cannot be reached" in ended.stderr


@on_ranks(2)
def test_ranks_with_different_policies_are_told(rank, tmp_path):
    when = ringstow.EverySteps(5 + rank) | ringstow.Before(1e10 + rank)
    kind, text = raised(lambda: ringstow.CheckpointManager(tmp_path / "run", when=when))
    assert kind == "InvalidStateError"
    assert "different when: rank 0: ['EverySteps(steps=5)', 'Before']" in text
