"""Two runs and one tier: whose steps a tier has, and which run may copy there."""

import shutil

import pytest
from tiered import manager_of, save, save_step_1, state_of, steps_in

import ringstow


def another_run(tmp_path):
    return ringstow.CheckpointManager(tmp_path / "other", tiers=[tmp_path / "shared/run"])


def test_two_runs_do_not_replace_each_others_copies(tmp_path, caplog):
    with manager_of(tmp_path) as first, another_run(tmp_path) as second:
        assert (first.restore(), second.restore()) == (None, None)
        save(first, 1)
        second.save(1, state_of(7))
        assert not second.wait_promoted(60)
        assert "has steps of another run" in str(second.promotion_error)
        # Later, too: its own steps are none of those there.
        with pytest.raises(ringstow.InvalidStateError, match="shared/run has steps of another run"):
            second.restore()
    assert ringstow.load(tmp_path / "shared/run/step-00000001")["step"] == 1
    assert "Name another place in tiers" in caplog.text


def test_run_that_was_never_copied_takes_no_other_runs_steps(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(9, state_of(9))
    ringstow.save(state_of(1), tmp_path / "other/step-1", step=1)
    with (
        another_run(tmp_path) as manager,
        pytest.raises(ringstow.InvalidStateError, match="of another run"),
    ):
        manager.restore()


def test_new_directory_goes_on_with_the_run_that_it_restores(tmp_path):
    save_step_1(tmp_path)
    with another_run(tmp_path) as manager:
        assert manager.restore().step == 1
        manager.save(2, state_of(2))
    assert manager.promotion_error is None
    assert steps_in(tmp_path / "shared/run") == [1, 2]


def test_program_whose_run_was_taken_over_is_shut_out(tmp_path, caplog):
    with manager_of(tmp_path) as first, another_run(tmp_path) as second:
        save(first, 1)
        assert second.restore().step == 1
        assert "goes on with the run whose steps are in" in caplog.text
        save(first, 2)  # a restore alone, of an evaluation, harms nobody
        save(second, 3)
        first.save(4, state_of(4))
        assert not first.wait_promoted(60)
        assert "has taken them over" in str(first.promotion_error)
    assert steps_in(tmp_path / "shared/run") == [1, 2, 3]
    with manager_of(tmp_path) as manager, pytest.raises(ringstow.InvalidStateError):
        manager.restore()


@pytest.mark.parametrize("look", ["restore", "latest"])
def test_kill_before_the_first_copy_shuts_the_other_program_out_all_the_same(tmp_path, look):
    """A look at the newest step does so as a restore does."""
    with manager_of(tmp_path) as first:
        save(first, 1)
        with another_run(tmp_path) as killed:
            assert getattr(killed, look)().step == 1
        with another_run(tmp_path) as second:  # it has forgotten what it was going to take over
            if look == "restore":
                assert second.restore().step == 1
            save(second, 2)
        first.save(2, state_of(20))
        assert not first.wait_promoted(60)
        assert "has taken them over" in str(first.promotion_error)
    assert ringstow.load(tmp_path / "shared/run/step-00000002")["step"] == 2


def test_tier_that_is_away_at_the_first_copy_of_a_new_directory_goes_on_too(tmp_path):
    tiers = [tmp_path / "near", tmp_path / "far"]
    with ringstow.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        manager.save(1, state_of(1))
    away = tmp_path / "unmounted"
    tiers[1].rename(away)
    with ringstow.CheckpointManager(tmp_path / "new", tiers=tiers) as manager:
        assert manager.restore().step == 1
        save(manager, 2)
    shutil.rmtree(tiers[1])  # what was made where the disk was not mounted
    away.rename(tiers[1])
    with ringstow.CheckpointManager(tmp_path / "new", tiers=tiers) as manager:
        assert manager.restore().step == 2
        save(manager, 3)
    assert steps_in(tiers[1]) == [1, 2, 3]
    shutil.rmtree(tmp_path / "new")
    with ringstow.CheckpointManager(tmp_path / "third", tiers=tiers) as manager:
        assert manager.restore().step == 3


def test_new_directory_that_a_kill_leaves_without_a_copy_stays_that_runs(tmp_path):
    save_step_1(tmp_path)
    with another_run(tmp_path) as manager:
        assert manager.restore().step == 1
        ringstow.save(state_of(2), tmp_path / "other/step-00000002", step=2)  # and is killed
    with another_run(tmp_path) as manager:
        assert manager.restore().step == 2
    assert steps_in(tmp_path / "shared/run") == [1, 2]


def test_directory_that_is_filled_from_the_copies_is_the_same_run(tmp_path):
    """By copies by hand, which take the names of the copied files along or not."""
    save_step_1(tmp_path)
    there = tmp_path / "shared/run/step-00000001"
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(there, tmp_path / "run/step-00000001")
    with manager_of(tmp_path) as manager:
        assert manager.restore().step == 1
        assert manager.wait_promoted(60)
    assert manager.promotion_report is None  # it is there
    ringstow.promote(there, tmp_path / "other/step-00000001")
    with another_run(tmp_path) as manager:
        assert manager.restore().path.startswith(str(tmp_path / "other"))
        manager.save(2, state_of(2))
    assert steps_in(tmp_path / "shared/run") == [1, 2]


def test_copy_by_hand_takes_no_other_runs_place(tmp_path):
    with manager_of(tmp_path) as first, another_run(tmp_path) as second:
        save(first, 1)
        second.save(9, state_of(9))
        assert not second.wait_promoted(60)
    with pytest.raises(ringstow.InvalidStateError, match="of another run"):
        ringstow.promote(tmp_path / "other/step-00000009", tmp_path / "shared/run/step-00000009")


def test_run_that_is_lost_before_its_first_copy_goes_on(tmp_path):
    (tmp_path / "shared/run").mkdir(parents=True)
    (tmp_path / "shared/run/step-00000001").write_text("")  # in the way
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "shared/run/step-00000001").unlink()
    with manager_of(tmp_path) as manager:
        assert manager.restore() is None
        manager.save(1, state_of(1))
    assert manager.promotion_error is None
    assert steps_in(tmp_path / "shared/run") == [1]


def test_directory_without_steps_becomes_that_of_the_run_it_restores(tmp_path):
    with another_run(tmp_path) as manager:
        manager.save(1, state_of(1))
    with ringstow.CheckpointManager(tmp_path / "run", tiers=[tmp_path / "elsewhere"]) as manager:
        manager.save(7, state_of(7))
    ringstow.remove(tmp_path / "run/step-00000007")
    with manager_of(tmp_path) as manager:
        assert manager.restore().step == 1
        manager.save(2, state_of(2))
    assert steps_in(tmp_path / "shared/run") == [1, 2]
