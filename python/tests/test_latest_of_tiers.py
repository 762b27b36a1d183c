"""`latest` of several directories: the nearest copy of the newest step."""

import shutil

import pytest
from tiered import state_of

import ringstow


@pytest.fixture
def tiers(tmp_path):
    """Return two directories that have steps 1 and 2 of one run."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    with ringstow.CheckpointManager(run, tiers=[shared]) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            assert manager.wait_promoted(60)
    return [run, shared]


def found(tiers, **options):
    newest = ringstow.latest(tiers, **options)
    return None if newest is None else (newest.path, ringstow.load(newest)["step"])


def test_nearest_copy_of_the_newest_step_is_found(tiers):
    run, shared = tiers
    assert found(tiers) == (str(run / "step-00000002"), 2)
    assert found(tiers[::-1]) == (str(shared / "step-00000002"), 2)
    shutil.rmtree(run / "step-00000002")
    assert found(tiers) == (str(shared / "step-00000002"), 2)
    assert found(tiers, before=2) == (str(run / "step-00000001"), 1)
    shutil.rmtree(run)
    assert found(tiers) == (str(shared / "step-00000002"), 2)


def test_newer_save_of_one_number_comes_first(tiers):
    run, _ = tiers
    with ringstow.CheckpointManager(run, tiers=[]) as manager:
        manager.save(2, {"step": 22})
    assert found(tiers[::-1]) == (str(run / "step-00000002"), 22)


def test_damaged_copies_are_passed_over_by_verify(tiers, caplog):
    run, shared = tiers
    [shard] = (run / "step-00000002").glob("*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert found(tiers, verify=True) == (str(shared / "step-00000002"), 2)
    for step in run.glob("step-*"):
        for shard in step.glob("*.safetensors"):
            shard.unlink()
    assert found(tiers) == (str(shared / "step-00000002"), 2)
    assert f"{run} has no step that can be loaded" in caplog.text
    shutil.rmtree(shared)
    with pytest.raises(ringstow.MissingFilesError, match="step-00000002"):
        found(tiers)


def test_nothing_is_found_where_nothing_is_committed(tmp_path):
    assert ringstow.latest([tmp_path / "a", tmp_path / "b"]) is None
    assert ringstow.latest([]) is None


def test_tiers_of_two_runs_are_refused(tmp_path, tiers):
    with ringstow.CheckpointManager(tmp_path / "c", tiers=[tmp_path / "d"]) as manager:
        manager.save(1, state_of(1))
    with pytest.raises(ringstow.InvalidStateError, match="another run"):
        ringstow.latest([tiers[0], tmp_path / "d"])


def test_before_a_path_is_for_one_directory(tiers):
    with pytest.raises(TypeError, match="before"):
        ringstow.latest(tiers, before=tiers[0] / "step-00000002")
