"""Kill a program before each call to the system, and make each call fail.

``python each_call.py PASSES SEED MINUTES DIRECTORY``, over an extension with the seam, for
``test_each_call.py``. The calls are those that Rust makes (`RINGSTOW_TEST_SEAM`) and those of
Python (`python_calls`). Afterwards the old or the new checkpoint is there, whole, or the path is
refused; the next operation works; and nothing else is left.

The n-th calls are dealt to 96 passes; a seed decides which come first. All passes have every call,
and then each fails with every error number; otherwise with one that the seed decides. PASSES 0 is
half a pass: of each task either the calls of Rust or those of Python, as the seed decides.
"""

import dataclasses
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable

import operations
import python_calls
from operations import KILLED, OPERATIONS, SMALL, look, must, start, state

import ringstow

STRIDE = 96
JOBS = 2
# A child that takes longer hangs.
LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Task:
    """What is done in a directory."""

    prepare: Callable
    """Called with the directory and one for what is not under test."""
    run: Callable
    """Called with these and ``begins``."""
    check: Callable
    """Called with the directories and whether it was done."""


def writes(operation, *, replaces):
    """Return the task to write step 2, over step 1 or to a new path."""

    def prepare(place, outside):
        place.mkdir()
        if replaces:
            operation(1, place / "c", outside, lambda: None)
        # The sources of steps 2 and 3.
        for step in (2, 3):
            operation(step, outside / place.name, outside, lambda: None)

    def run(place, outside, begins):
        operation(2, place / "c", outside, begins)

    def check(place, outside, done):
        look(place / "c", outside, [2] if done else [1 if replaces else None, 2])
        operation(3, place / "c", outside, lambda: None)
        look(place / "c", outside, [3])
        assert not (left := operations.left_over(place / "c")), f"{left} is left"

    return Task(prepare, run, check)


def save(step, path):
    ringstow.save(state(step), path, config=SMALL)


def files_in(directory):
    return [os.path.join(at, name) for at, _, names in os.walk(directory) for name in names]


def prepare_removal(place, outside):
    save(1, place / "c")


def run_removal(place, outside, begins):
    begins()
    ringstow.remove(place / "c", config=SMALL)


def check_removal(place, outside, done):
    found = look(place / "c", outside, [None] if done else [1, None])
    assert not ringstow.prune(place, config=SMALL).left
    assert found or not files_in(place), files_in(place)
    save(3, place / "c")
    look(place / "c", outside, [3])
    assert not operations.left_over(place / "c")


def prepare_retention(place, outside):
    for step in (1, 2, 3):
        save(step, place / f"step-{step}")


def run_retention(place, outside, begins):
    begins()
    ringstow.retain(place, 1, config=SMALL)


def check_retention(place, outside, done):
    found = [step for step in (1, 2, 3) if look(place / f"step-{step}", outside, [step, None])]
    assert 3 in found, found
    assert ringstow.latest(place).path == str(place / "step-3")
    ringstow.retain(place, 1, config=SMALL)
    assert not ringstow.prune(place).left
    # An empty directory may be anybody's.
    left = [file for file in files_in(place) if not file.startswith(f"{place}/step-3/")]
    assert not left, f"{left} is left"
    save(4, place / "step-4")


def prepare_pruning(place, outside):
    """Leave a killed save and a killed removal beside a checkpoint."""
    # In a child: a process in which the library has run takes no orders any more.
    must(start(save, 1, place / "c")(), "saving")
    for call in range(10, 1000):
        code, said = start(in_child, "rust", f"kill:{call}", save_2, place, outside)()
        assert was_killed(code), said
        if any(name.endswith(".part") for name in os.listdir(place / "c")):
            break
    save(7, place / "step-7")
    os.rename(place / "step-7" / "manifest.json", place / "step-7" / "manifest.json.retired")


def save_2(place, outside, begins):
    begins()
    save(2, place / "c")


def run_pruning(place, outside, begins):
    begins()
    ringstow.prune(place, config=SMALL)


def check_pruning(place, outside, done):
    look(place / "c", outside, [1])
    # A call that failed leaves what it concerned, for the next.
    assert not ringstow.prune(place).left
    assert not files_in(place / "step-7")
    assert not [name for name in files_in(place) if name.endswith(".part")]
    save(3, place / "c")
    look(place / "c", outside, [3])


# Each kind as a target, to a new path and over an old checkpoint, and as a source.
TASKS = {
    f"{name}{' over' if replaces else ''}": writes(OPERATIONS[name], replaces=replaces)
    for name, replaces in [
        *(("torch-to-ringstow", False), ("dcp-to-ringstow", True), ("ringstow-to-dcp", False)),
        *(("ringstow-to-dcp", True), ("hf-to-dcp", True), ("ringstow-to-torch", False)),
        *(("dcp-to-torch", True), ("ringstow-to-hf", False), ("torch-to-hf", True)),
        *(("save", False), ("save", True), ("save-async", True), ("promote", False)),
        *(("promote", True), ("dcp-save", False), ("dcp-save", True), ("dcp-async-save", True)),
        *(("dcp-save-by-ranks", True), ("dcp-save-by-ranks-1", True)),
        *(("hf-export-by-ranks", False), ("hf-export-by-ranks", True)),
        ("hf-export-by-ranks-1", True),
    ]
} | {
    "remove": Task(prepare_removal, run_removal, check_removal),
    "retain": Task(prepare_retention, run_retention, check_retention),
    "prune": Task(prepare_pruning, run_pruning, check_pruning),
}


def in_child(layer, order, run, place, outside):
    """Do it with a call that fails or kills."""

    def begins():
        if layer == "rust":
            os.environ["RINGSTOW_TEST_SEAM"] = order
        else:
            python_calls.arm(order, place.parent)

    signal.alarm(LIMIT_S)
    run(place, outside, begins)


def was_killed(code):
    return code in (-signal.SIGKILL, -signal.SIGABRT, KILLED)


class Worker:
    """Does some of the tasks in a directory of its own."""

    def __init__(self, directory, errors):
        self._directory = directory
        self._outside = directory / "outside"
        self._outside.mkdir(parents=True)
        self._errors = errors
        self._prepared = set()
        self.kills = self.failures = 0

    def attempt(self, name, layer, order):
        """Do a task once and check it; say whether the call was reached, if it was to kill."""
        task, place = TASKS[name], self._directory / "place"
        prepared = self._directory / f"prepared-{name}"
        if name not in self._prepared:
            must(start(task.prepare, prepared, self._outside)(), f"preparing {name}")
            self._prepared.add(name)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(prepared, place)
        code, said = start(in_child, layer, order, task.run, place, self._outside)()
        what = f"{name}, {order} of {layer}, ended with {code}: {said}\nthen"
        assert code in (0, operations.REFUSED) or was_killed(code), f"UNCLEAR: {what}"
        must(start(task.check, place, self._outside, code == 0)(), what)
        return was_killed(code)

    def pass_over(self, name, layer, first):
        """Kill before the n-th call, and make it fail, for every 96th n until there is none."""
        n = first
        while self.attempt(name, layer, f"kill:{n}"):
            self.kills += 1
            for number in self._errors():
                self.attempt(name, layer, f"fail:{n}:{number}")
                self.failures += 1
            n += STRIDE


def units(names, passes, seed):
    """Return what a pass has, in the seed's order: each task with the calls of each layer."""
    chance = random.Random(seed)
    layers = ("rust", "python")
    found = [
        (name, layer) for name in names for layer in (layers if passes else [chance.choice(layers)])
    ]
    chance.shuffle(found)
    return found


def work(job, directory, passes, seed, minutes, names):
    """Do this job's share of the tasks, pass by pass; report what was done."""
    deadline = time.monotonic() + minutes * 60
    chance = random.Random(seed)
    firsts = chance.sample(range(1, STRIDE + 1), STRIDE)[: max(passes, 1)]
    errors = python_calls.ERRORS
    worker = Worker(directory, lambda: errors if passes == STRIDE else [chance.choice(errors)])
    ended = 0
    for first in firsts:
        for name, layer in units(names, passes, seed)[job::JOBS]:
            if time.monotonic() > deadline:
                break
            worker.pass_over(name, layer, first)
        else:
            ended += 1
    print(worker.kills, worker.failures, ended)


def main():
    passes, seed = map(int, sys.argv[1:3])
    minutes, directory = float(sys.argv[3]), pathlib.Path(sys.argv[4])
    names = sys.argv[5:] or list(TASKS)
    waits = [
        start(work, job, directory / str(job), passes, seed, minutes, names) for job in range(JOBS)
    ]
    outcomes = [wait() for wait in waits]
    bad = [said for code, said in outcomes if code]
    if bad:
        sys.exit("\n".join(bad) + f"\nseed {seed}")
    done = [list(map(int, said.split()[-3:])) for _, said in outcomes]
    kills, failures, ended = (sum(job[i] for job in done) for i in range(3))
    whole = ended / JOBS * (1 if passes else 0.5)
    print(f"{len(names)} tasks, {whole:g} of {STRIDE} passes, seed {seed}")
    print(
        "promise: a Python save, removal or conversion that is killed, or of which a call fails, "
        f"leaves the old or the new: {kills} kills, {failures} failures, 0 broken"
    )


if __name__ == "__main__":
    main()
