"""DeepSpeed's trainings that are killed while they save, and saves that fail on one rank."""

from __future__ import annotations

import functools
import signal

import pytest

pytest.importorskip("deepspeed")

import children
import deepspeed_runs as runs
from deepspeed_runs import EVERY
from support import assert_same
from test_deepspeed import KINDS, fit, latest

import ringstow

pytestmark = pytest.mark.timeout(600)

# The kind, the number of ranks, the moment, which ranks are killed, and the tag of all saves.
MOMENTS = [
    ("stage 1", 1, "beginning", (0,), None),
    ("stage 1", 1, "writing", (0,), None),
    ("stage 1", 1, "started", (0,), None),
    ("stage 1", 1, "training", (0,), None),
    ("stage 1", 1, "written", (0,), None),
    ("stage 1", 1, "renaming", (0,), None),
    ("stage 1", 1, "naming", (0,), None),
    ("stage 1", 2, "writing", (0, 1), None),
    ("stage 1", 2, "training", (1,), None),
    ("stage 1", 2, "written", (0,), None),
    ("stage 1", 2, "naming", (0,), None),
    ("stage 3", 2, "training", (0, 1), None),
    ("stage 1", 2, "started", (1,), "last"),
    ("stage 1", 1, "renaming", (0,), "last"),
    ("stage 1", 1, "naming", (0,), "last"),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the end of a run that is not killed, by its kind and number of ranks."""
    return functools.cache(
        lambda kind, ranks: fit(kind, ranks, tmp_path_factory.mktemp("unbroken"))
    )


@pytest.mark.parametrize(("kind", "ranks", "moment", "victims", "tag"), MOMENTS)
def test_a_killed_run_resumes_from_the_last_complete_tag_and_ends_with_the_same_bits(
    kind, ranks, moment, victims, tag, tmp_path, unbroken
):
    folder = tmp_path / "run"
    codes = children.exit_codes(ranks, runs.killed, KINDS[kind], folder, moment, victims, tag)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    # A tag that is saved again is complete once it is renamed; another one once it is named.
    steps = 2 * EVERY if tag is not None and moment == "naming" else EVERY
    named = folder / latest(folder)
    assert named.name == (tag or f"global_step{steps}")
    files = list(named.glob("*_states.pt"))
    assert len(files) == ranks * 2 if kind == "stage 3" else ranks + 1
    assert all(ringstow.verify(one).ok for one in files)
    end = children.results(ranks, runs.fit, KINDS[kind], folder, tag)
    assert_same(end, [(steps, learned) for _, learned in unbroken(kind, ranks)])
    assert not [one for one in folder.iterdir() if one.name.startswith(".ringstow")]


@pytest.mark.parametrize(
    ("cause", "victim"),
    [("value", 0), ("value", 1), ("full disk", 0), ("full disk", 1), ("full disk for scripts", 0)],
)
def test_a_rank_that_cannot_save_fails_the_save_on_all_ranks_and_leaves_latest(
    cause, victim, tmp_path
):
    folder = tmp_path / "run"
    args = KINDS["stage 1"], folder, victim, cause
    for rank, (raised, found) in enumerate(children.results(2, runs.fail, *args)):
        # The disk is full for the shards later, in the background.
        failed = 1 if cause == "full disk" else 0
        said = raised.pop(failed)
        assert raised == [None, None]
        assert ("odd" if cause == "value" else "File too large") in said
        assert rank == victim or f"rank {victim} failed" in said
        assert cause != "value" or rank != victim or "use(allow_pickle=True)" in said
        assert "before" in found
        assert "failed" not in found
    assert latest(folder) == "after"


@pytest.mark.parametrize("call", ["destroy", "__del__"])
def test_the_failure_of_the_last_save_is_reported_at_the_exit(call, tmp_path):
    folder = tmp_path / "run"
    children.results(1, runs.lose, KINDS["stage 0"], folder, call)
    assert not list(folder.iterdir())
