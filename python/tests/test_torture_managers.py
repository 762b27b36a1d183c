"""A short run of torture_managers.py: killed programs of a manager lose no step.

The oracle is also tested by itself, on ledgers that are made up: it must find what is lost, and
must not ask for what a rule may have removed.
"""

import dataclasses
import os
import subprocess
import sys

import pytest
from support import ROOT
from torturing.managers.look import Entry, Seen
from torturing.managers.oracle import Oracle
from torturing.managers.rules import Limits, Rules, Saved

KILLS = 12


def test_killed_programs_of_a_manager_lose_nothing(tmp_path):
    # Not in this process: the programs are forked from one with one thread.
    # The run of seed 17 is by two ranks.
    options = ["--kills", str(KILLS), "--seed", "16", "--dir", str(tmp_path)]
    command = [sys.executable, str(ROOT / "tools/torture_managers.py"), *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    promise = ran.stdout.splitlines()[-1]
    assert promise.startswith("promise: ")
    assert promise.endswith(f": {KILLS} kills, 0 broken")
    assert os.listdir(tmp_path) == []


def opened(**rules):
    return [{"what": "open", "when": "end", "rules": dataclasses.asdict(Rules(**rules))}]


def begun(step, save=None, loss=None):
    return [{"what": "save", "when": "begin", "step": step, "save": save or step, "loss": loss}]


def saved(step, save=None, loss=None):
    (line,) = begun(step, save, loss)
    return [line, {**line, "when": "end"}]


def entry(step, save=None, status="committed", dropped=(), wrong=()):
    name = f"step-{step:08}"
    return Entry(name, step, save or step, status, None, list(dropped), list(wrong))


def seen(*entries, tiers=(), restored=None):
    """Return what a look finds: these steps, of which the last is the newest."""
    last = restored or entries[-1]
    found = {"step": last.step, "save": last.save, "wrong": []}
    return Seen([list(entries), *map(list, tiers)], entries[-1].name, found)


def broken(lines, look):
    oracle = Oracle()
    oracle.follow(lines)
    oracle.compare(look)
    return oracle.broken


TWO = [*opened(), *saved(1), *saved(2)]


def test_what_was_saved_is_found_and_nothing_is_broken():
    assert broken(TWO, seen(entry(1), entry(2))) == []


def test_save_that_was_begun_may_be_there_or_not():
    lines = [*TWO, *begun(3)]
    assert broken(lines, seen(entry(1), entry(2))) == []
    assert broken(lines, seen(entry(1), entry(2), entry(3))) == []


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (seen(entry(1)), "not the newest"),
        (seen(entry(2)), "lost: step 1"),
        (seen(entry(1), entry(2), restored=entry(1)), "not the newest"),
        (seen(entry(1), entry(2), entry(3)), "never saved"),
        (seen(entry(1), entry(2, wrong=["/model/weight"])), "other values"),
        (seen(entry(1, dropped=["optimizer"]), entry(2)), "has lost {'optimizer'}"),
        (seen(entry(1, status="damaged"), entry(2)), "is damaged"),
        (seen(entry(2), entry(1)), "oldest first"),
        (Seen([[]], None, None), "not the newest"),
    ],
)
def test_each_kind_of_loss_is_found(look, text):
    assert any(text in said for said in broken(TWO, look))


def test_step_is_no_longer_asked_for_once_a_rule_may_have_removed_it():
    assert broken([*opened(last=1), *saved(1), *saved(2)], seen(entry(2))) == []
    lines = [*opened(last=2), *saved(1), *saved(2), *begun(3)]
    assert broken(lines, seen(entry(2), entry(3))) == []
    assert broken(lines, seen(entry(2))), "step 3 was not committed"


def test_kept_step_is_asked_for_whatever_the_rules_say():
    keep = [{"what": "keep", "when": when, "step": 1} for when in ("begin", "end")]
    lines = [*opened(last=1), *saved(1), *keep, *saved(2), *saved(3)]
    assert broken(lines, seen(entry(1), entry(3))) == []
    assert any("lost: step 1" in said for said in broken(lines, seen(entry(3))))


def test_step_that_keep_here_lets_go_must_be_on_every_tier():
    lines = [*opened(keep_here=1), *saved(1), *saved(2)]
    one, two = entry(1), entry(2)
    assert broken(lines, seen(two, tiers=[[one, two], [one]])) == []
    assert any("lost: step 1" in said for said in broken(lines, seen(two, tiers=[[one], []])))


def test_steps_that_going_back_has_dropped_must_not_come_back():
    back = {"what": "go_back", "step": 1, "drops": True}
    found = {"step": 1, "save": 1, "dropped": [], "wrong": []}
    begins, ends = {**back, "when": "begin"}, {**back, "when": "end", "found": found}
    assert broken([*TWO, begins], seen(entry(1))) == []
    assert broken([*TWO, begins], seen(entry(1), entry(2))) == []
    assert broken([*TWO, begins, ends], seen(entry(1))) == []
    assert broken([*TWO, begins, ends], seen(entry(1), entry(2)))


def test_rules_that_may_keep_a_step_are_those_that_surely_do_and_more():
    steps = [Saved(number, number, loss) for number, loss in ((1, 0.5), (2, 0.5), (3, None))]
    best = Limits(last=1, best=("loss", "min", 1))
    assert [best.surely_keeps(step, steps) for step in steps] == [False, False, True]
    assert [best.may_keep(step, steps) for step in steps] == [True, True, True]
    every = Limits(every=2)
    assert [every.may_keep(step, steps) for step in steps] == [False, True, True]
