"""A short run of torture_background.py: a save commits the values of the call or nothing."""

import pytest
from torturing.changes import ORDINARY, SEEN, UNSEEN
from torturing.loops import run
from torturing.trainer import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("one_thread")

LOOPS = 40
PER_TEST = 10


@pytest.mark.parametrize("first", range(0, LOOPS, PER_TEST))
def test_save_commits_the_values_of_the_call_or_nothing(first, tmp_path):
    results = []
    for seed in range(first, first + PER_TEST):
        (tmp_path / str(seed)).mkdir()
        results.append(run(seed, tmp_path / str(seed)))
    assert [result for result in results if result.torn] == []
    assert any("saved" in result.outcomes for result in results)


def test_every_change_is_in_seen_or_unseen():
    assert set(ORDINARY) < set(SEEN)
    assert not set(SEEN) & set(UNSEEN)
    assert any("fused" in name for name in OPTIMIZERS)
