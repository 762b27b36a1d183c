"""Python's manager and Rust's leave the same steps in the same places, scenario by scenario."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import stepped_clock
from support import flip

import ringstow

FILE = pathlib.Path(__file__).parents[3] / "tests/manager_scenarios.json"
SCENARIOS = json.loads(FILE.read_text())
NOON = 1_800_000_000  # where Rust's clock begins; a minute later no hour is near its end
KEEP = ("last", "every", "every_time", "within", "best", "slim_after")
TIERS = {"last_there": "keep", "keep_here": "keep_here"}


def state_of(step):
    values = np.full(9000, step, np.uint8)
    return {"w": values, "optimizer": {"m": values + 1, "lr": 0.5}}


class Scene:
    """A run, its places, and the manager that is open."""

    def __init__(self, scenario, directory):
        self.scenario = scenario
        self.directory = directory
        self.manager = None
        self.open({})

    def open(self, others):
        self.close()
        rules = {**self.scenario, **others}
        keep = ringstow.Retention(**{name: rules[name] for name in KEEP if name in rules})
        places = [self.directory / place for place in self.scenario.get("places", [])]
        there = {field: rules[name] for name, field in TIERS.items() if name in rules}
        tiers = ringstow.Tiers(places, **there)
        self.manager = ringstow.CheckpointManager(self.directory / "here", keep=keep, tiers=tiers)

    def close(self):
        if self.manager is not None:
            self.manager.close()

    def step(self, place, number):
        return self.directory / place / f"step-{number:08}"

    def shard(self, place, number):
        return min(self.step(place, number).glob("*.safetensors"))

    def act(self, what, of, loss=None):
        getattr(self, what)(*(of if isinstance(of, list) and what != "is_here" else [of]))

    def save(self, number, loss=None):
        self.manager.save(number, state_of(number), None if loss is None else {"loss": loss})
        self.manager.wait_promoted()  # a place may be away

    def restore(self, number):
        self.manager.restore(number)

    def drop_newer(self, number):
        self.manager.restore(number, drop_newer=True)
        assert self.manager.wait_promoted()

    def keep(self, number):
        self.manager.keep(number)

    def release(self, number):
        assert self.manager.release(number)

    def away(self, place):
        there = self.directory / place
        if there.exists():
            there.rename(f"{there}.away")
        there.write_text("not mounted")

    def back(self, place):
        there = self.directory / place
        there.unlink()
        if os.path.exists(f"{there}.away"):
            pathlib.Path(f"{there}.away").rename(there)

    def is_here(self, numbers):
        assert self.steps_in("here") == numbers

    def lose(self, place, number):
        shutil.rmtree(self.step(place, number))

    def lose_file(self, place, number):
        self.shard(place, number).unlink()

    def cut(self, place, number):
        os.truncate(self.shard(place, number), 9)

    def flip(self, place, number):
        flip(self.shard(place, number), -1)

    def link(self, number):
        os.symlink(self.step("here", number) / "manifest.json", self.directory / "here/mine")

    def clock(self, seconds):
        ahead = int(os.environ["NOON_AHEAD"]) + seconds
        pathlib.Path(os.environ["CLOCK_FILE"]).write_text(str(ahead))

    def steps_in(self, place):
        return sorted(found.step for found in ringstow.steps(self.directory / place))

    def check(self):
        """Compare what is where once the manager is closed, and what the next one finds."""
        self.close()
        for place in ("here", "a", "b"):
            if place in self.scenario:
                assert self.steps_in(place) == self.scenario[place], place
        if "whole" in self.scenario:
            found = ringstow.steps(self.directory / "here")
            assert sorted(one.step for one in found if not one.dropped) == self.scenario["whole"]
        self.open({})
        if "best_step" in self.scenario:
            assert self.manager.best().step == self.scenario["best_step"]
        if "restored" not in self.scenario:
            return
        on_corrupt = "previous" if self.scenario.get("passes_over") else "raise"
        if self.scenario["restored"] == "refused":
            with pytest.raises(ringstow.Error):
                self.manager.restore(on_corrupt=on_corrupt)
            return
        restored = self.manager.restore(on_corrupt=on_corrupt)
        assert restored.step == self.scenario["restored"]
        assert restored.state["w"][0] == restored.step


def play(scenario, directory):
    scene = Scene(scenario, directory)
    for act in scenario["acts"]:
        (what, of), *more = act.items()
        if what == "save":
            scene.save(of, **dict(more))
        else:
            scene.act(what, of)
    scene.check()
    scene.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one["name"] for one in SCENARIOS])
def test_both_managers_leave_the_same_steps_in_the_same_places(scenario, tmp_path):
    if not any("clock" in act for act in scenario["acts"]):
        return play(scenario, tmp_path)
    number = str(SCENARIOS.index(scenario))
    program = [sys.executable, __file__, number, tmp_path]
    more = {"NOON_AHEAD": str(int(NOON - time.time()) + 60)}
    more["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    env = stepped_clock.environment(tmp_path) | more
    ran = subprocess.run(program, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


if __name__ == "__main__":
    play(SCENARIOS[int(sys.argv[1])], pathlib.Path(sys.argv[2]))
