"""Ranks look, call and fail together; one process does the same with nobody."""

from __future__ import annotations

import logging
import os
import re
from unittest.mock import patch

import pytest
import torch.distributed as dist
from ranks import on_ranks
from support import logged

import ringstow
from ringstow._core import _waiting
from ringstow._ranks._group import Group, of_all_ranks, team_of
from ringstow._ranks._team import Team


def fail():
    raise KeyError("no key")


def test_one_process_meets_nobody(tmp_path):
    team = team_of()
    assert (type(team), team.rank, team.size, team.is_first) == (Team, 0, 1, True)
    assert team.gathered(5) == team.to_first(5) == team.together(lambda: 5) == [5]
    assert team.from_first(lambda: 5) == team.each(lambda: 5) == 5
    assert team.meet(("save", 1), None, "said") == ["said"]
    team.agree(None)
    team.see(str(tmp_path / "nothing"))
    for call in (
        lambda: team.from_first(fail),
        lambda: team.each(fail),
        lambda: team.agree(KeyError("no key")),
        lambda: team.meet(("save", 1), KeyError("no key"), None),
    ):
        with pytest.raises(KeyError, match="no key"):
            call()


def one_fails(rank, victim):
    def call():
        if rank == victim:
            raise KeyError(f"no key on rank {rank}")
        return rank

    try:
        return Group().each(call)
    except Exception as error:
        return type(error).__name__, str(error)


def test_each_returns_its_own_result_on_each_rank(ranks):
    assert ranks(2).run(one_fails, None) == [0, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_each_raises_on_all_ranks_what_one_raises(ranks, victim):
    said = ranks(2).run(one_fails, victim)
    assert said[victim] == ("KeyError", f"'no key on rank {victim}'")
    kind, text = said[1 - victim]
    assert kind == "Error"
    assert f"rank {victim} failed: KeyError" in text


@on_ranks(2)
def test_a_group_that_was_destroyed_too_early_is_named_with_what_to_call_first(rank):
    group = dist.new_group(backend="gloo")
    team = Group(group)
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group(group)
    first = "result(), or close the manager, before destroy_process_group()"
    for ask in (
        lambda: Group(group),
        lambda: team.gathered(None),
        lambda: team.agree(None),
        lambda: team.from_first(lambda: 1),
    ):
        with pytest.raises(ringstow.InvalidStateError, match=re.escape(first)):
            ask()


@pytest.mark.parametrize("makes_group", [False, True])
@on_ranks(2)
def test_a_rank_says_that_it_waits_for_others(rank, tmp_path, makes_group):
    """Rank 1 comes once rank 0 has logged."""
    what = "new_group()" if makes_group else "the save to run/step-1"
    mark, patience = tmp_path / "logged", 0.0 if rank == 0 else _waiting.PATIENCE_S
    handler = logging.Handler()
    handler.emit = lambda record: mark.touch()
    logger = logging.getLogger("ringstow")
    logger.addHandler(handler)
    try:
        with logged() as said, patch.object(_waiting, "PATIENCE_S", patience):
            while rank == 1 and not mark.exists():
                os.sched_yield()
            if makes_group:
                of_all_ranks()
            else:
                group = Group()
                group.doing = what
                group.gathered(rank)
    finally:
        logger.removeHandler(handler)
    assert len(said) == (1 if rank == 0 else 0)
    for text in said:
        waits = f"rank 0 of 2 waits for the other ranks in {what}; all of them must make"
        assert text.startswith(waits)
        assert f", for 0 s so far, on node {os.uname().nodename} in process " in text
