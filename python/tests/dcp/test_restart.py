"""A training that was killed restarts in fresh processes, on any number of ranks.

`restarts` is its program. All pairs of ranks and all optimizers: `make torture-restarts`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import signal

import forked
import pytest

HERE = pathlib.Path(__file__).parent
EVERY = os.environ.get("RINGSTOW_RESTARTS") == "all"
# 0 is one process without a process group.
PAIRS = [(2, 2), (2, 4), (4, 1), (0, 2), (2, 0)]
if EVERY:
    PAIRS = [(saved, ranks) for saved in (0, 1, 2, 4) for ranks in (0, 1, 2, 4)]
OPTIMIZERS = "adamw sgd momentum adam-groups" if EVERY else "adam-groups"


def run(root, what, ranks, saved):
    """Run all ranks in fresh processes; return their exit codes and what they said."""
    environment = os.environ | {"RESTARTS_OPTIMIZERS": OPTIMIZERS}
    program = HERE / "restarts.py"
    started = [
        forked.Program(forked.SCRIPT, root, what, rank, ranks, saved, name=program, env=environment)
        for rank in range(max(ranks, 1))
    ]
    ended = [one.wait(timeout=500) for one in started]
    return [one.returncode for one in ended], "\n".join(one.stdout + one.stderr for one in ended)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return a function that returns the directory of trainings that so many ranks had saved."""

    @functools.cache
    def directory(ranks):
        root = tmp_path_factory.mktemp(f"saved-by-{ranks}")
        codes, said = run(root, "save", ranks, ranks)
        assert codes == [-signal.SIGKILL] * max(ranks, 1), said
        return root

    return directory


@pytest.mark.parametrize(("saved", "ranks"), PAIRS)
def test_a_killed_training_restarts_in_fresh_processes_as_if_it_had_not_been_stopped(
    killed, tmp_path, saved, ranks
):
    shutil.copytree(killed(saved), tmp_path / "runs")
    codes, said = run(tmp_path / "runs", "resume", ranks, saved)
    assert codes == [0] * max(ranks, 1), said
