"""`CheckpointManager` with a directory on another disk behind its own."""

import shutil

import forked
import pytest
import torch
from tiered import (
    before_copies,
    hold,
    is_of,
    manager_of,
    pause,
    refuse,
    ruin,
    save,
    save_step_1,
    state_of,
    steps_in,
)

import ringstow


@pytest.fixture
def there(tmp_path):
    return tmp_path / "shared/run"


def cut(manifest):
    manifest.write_bytes(manifest.read_bytes()[:-9])


def test_run_goes_on_in_the_directory_of_the_copies(tmp_path, there):
    save_step_1(tmp_path)
    with ringstow.CheckpointManager(there, keep=2) as manager:
        assert manager.restore().step == 1
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    assert steps_in(there) == [2, 3]


def test_directory_and_store_are_both_tiers(tmp_path, bucket):
    tiers = [tmp_path / "shared", f"{bucket.url}/run"]
    with ringstow.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        manager.save(1, state_of(1))
    assert [steps_in(tier) for tier in tiers] == [[1], [1]]


SAVING = """
import sys, ringstow, torch
root, tier = sys.argv[1:]
manager = ringstow.CheckpointManager(root, tiers=ringstow.Tiers([tier], rate=1 << 20))
manager.save(1, {"w": torch.zeros(60 << 20, dtype=torch.uint8)})
manager.wait_promoted()
"""


def test_copy_that_a_kill_cut_short_is_ended_by_the_next_run(tmp_path, there):
    copy = there / "step-00000001"
    program = forked.Program(SAVING, tmp_path / "run", there)
    while not list(copy.glob("*.part")):
        assert program.is_running()
    program.kill()
    program.wait()
    assert ringstow.latest(there) is None
    with manager_of(tmp_path) as manager:
        manager.restore()
    assert ringstow.latest(there).path == str(copy)
    assert not list(copy.glob("*.part"))
    assert ringstow.load(copy)["w"].numel() == 60 << 20


def test_disk_that_refuses_fails_the_copy_and_not_the_save(tmp_path, there, caplog):
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        # A file where the next copy needs a directory.
        (there / "step-00000002").write_text("")
        manager.save(2, state_of(2))
        assert not manager.wait_promoted(60)
        assert isinstance(manager.promotion_error, OSError)
        assert "`ringstow promote" in caplog.text
        manager.save(3, state_of(3))
    assert manager.promotion_error is None
    assert steps_in(there) == [1, 3]


def test_copy_that_failed_is_tried_a_last_time_when_the_manager_closes(tmp_path, there, caplog):
    there.mkdir(parents=True)
    (there / "step-00000001").write_text("")
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        (there / "step-00000001").unlink()
    assert "It is tried again in 30 s" in caplog.text
    assert manager.promotion_error is None
    assert steps_in(there) == [1]


def test_copy_that_failed_is_tried_again_until_the_store_is_back(tmp_path, there, monkeypatch):
    tries = refuse(monkeypatch, lambda *_: len(tries) < 4)
    pause(monkeypatch)
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        while not manager.wait_promoted(60):
            assert isinstance(manager.promotion_error, ConnectionRefusedError | None)
    assert len(tries) == 4
    assert steps_in(there) == [1]


def test_copy_that_waits_for_another_try_gives_way_to_a_newer_step(tmp_path, there, monkeypatch):
    refuse(monkeypatch, lambda _, to: to.endswith("1"))
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        save(manager, 2)
    assert steps_in(there) == [2]


def test_step_after_going_back_does_not_give_way_to_older_ones_of_higher_numbers(
    tmp_path, there, monkeypatch
):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 7, 8, 9):
            manager.save(step, state_of(step))
        manager.restore(1)
        manager.save(2, state_of(2))
    begun, may_go = hold(monkeypatch)
    with manager_of(tmp_path, keep=9, keep_here=9) as manager:
        assert manager.restore().step == 2  # and has all steps copied
        assert begun.wait(300)
        manager.save(3, state_of(3))
        may_go.set()
        assert manager.wait_promoted(60)
        assert sorted(steps_in(there)) == [1, 2, 3, 7, 8, 9]


def test_steps_that_stay_for_good_are_not_passed_over(tmp_path, there, monkeypatch):
    begun, may_go = hold(monkeypatch)
    with manager_of(tmp_path, keep=ringstow.Retention(last=1, every=3)) as manager:
        manager.save(1, state_of(1))
        assert begun.wait(300)
        for step in range(2, 9):
            manager.save(step, state_of(step))
        may_go.set()
    assert steps_in(there) == steps_in(tmp_path / "run") == [3, 6, 8]


def test_step_that_stays_for_good_is_tried_again_with_the_next(tmp_path, there, monkeypatch):
    tries, outcomes = refuse(monkeypatch, lambda *_: len(tries) == 1), []
    with (
        ringstow.on_done(outcomes.append, kinds=["promotion"]),
        manager_of(tmp_path, keep=ringstow.Retention(last=1, every=3)) as manager,
    ):
        manager.save(3, state_of(3))
        assert not manager.wait_promoted(60)
        save(manager, 4)
    assert [int(to[-8:]) for to in tries] == [3, 4, 3]  # the newest first
    assert steps_in(there) == [3, 4]
    assert [type(one.error) for one in outcomes] == [ConnectionRefusedError, type(None), type(None)]


def test_tier_that_cannot_be_claimed_is_a_failed_promotion(tmp_path, there):
    there.parent.mkdir()
    there.write_text("no directory")
    outcomes = []
    with (
        ringstow.on_done(outcomes.append, kinds=["promotion"]),
        manager_of(tmp_path) as manager,
    ):
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
    assert outcomes
    assert all(isinstance(one.error, OSError) for one in outcomes)
    assert outcomes[0].to == str(there / "step-00000001")


def test_restore_with_the_help_of_a_copy_copies_nothing(tmp_path, there, caplog):
    save_step_1(tmp_path)
    [shard] = (tmp_path / "run" / "step-00000001").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with manager_of(tmp_path) as manager:
        assert is_of(manager.restore().state, 1)
        assert manager.wait_promoted(60)
        assert manager.promotion_error is None
    assert f"reading its copy {there}/step-00000001/" in caplog.text
    assert "not copied" not in caplog.text


def test_tiers_in_the_run_s_or_one_another_s_directory_and_stripes_are_refused(tmp_path):
    striped = ringstow.Config(
        stripe=[tmp_path / "disk2"], files=2, block_bytes=4096, pool_bytes=1 << 20
    )
    for tiers, config in [
        ([tmp_path], None),
        ([tmp_path / "run"], None),
        ([tmp_path / "run" / "x"], None),
        ([tmp_path / "a", tmp_path / "a/step-00000001"], None),
        (["s3://b/run", "s3://b/run/x"], None),
        ([tmp_path / "disk2"], striped),
    ]:
        with pytest.raises(ringstow.InvalidStateError, match="one is in the other"):
            ringstow.CheckpointManager(tmp_path / "run", tiers=tiers, config=config)
    (tmp_path / "disk2").mkdir()
    (tmp_path / "run").mkdir()
    two = {name: torch.zeros(1 << 20) for name in "ab"}
    ringstow.save(two, tmp_path / "run/a", config=striped)
    ringstow.save(state_of(1), tmp_path / "b")
    assert (tmp_path / "disk2/a").exists()
    with pytest.raises(ringstow.InvalidStateError, match="is striped over it"):
        ringstow.promote(tmp_path / "b", tmp_path / "disk2/a")


def test_disk_that_may_not_be_mounted_is_told(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        assert "on the same file system as" in caplog.text
        assert manager.restore() is None
    assert "does not exist" in caplog.text


def test_copy_whose_manifest_is_gone_is_told(tmp_path, there, caplog):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2)
    shutil.rmtree(tmp_path / "run")
    (there / "step-00000002/manifest.json").unlink()
    with manager_of(tmp_path) as manager:
        assert manager.restore().step == 1
    assert "step-00000002, whose manifest is gone" in caplog.text


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("damage", [cut, lambda manifest: manifest.write_bytes(b"damaged")])
def test_damaged_manifest_is_told_where_its_copy_is_restored(tmp_path, there, caplog, last, damage):
    with manager_of(tmp_path) as manager:
        save(manager, *range(1, last + 1))
    near = tmp_path / f"run/step-{last:08}"
    damage(near / "manifest.json")
    with manager_of(tmp_path) as manager:
        assert manager.restore().path == str(there / near.name)
    assert f"{near / 'manifest.json' if last == 1 else near} is damaged" in caplog.text


def test_step_that_somebody_removed_before_its_copy_is_an_error(tmp_path, monkeypatch):
    before_copies(monkeypatch, lambda path, _: shutil.rmtree(path))
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
    assert isinstance(manager.promotion_error, FileNotFoundError)


def test_copy_neither_replaces_nor_removes_what_a_planted_link_leads_to(tmp_path, there):
    precious = tmp_path / "precious"
    ringstow.save(state_of(42), precious, step=5)
    there.mkdir(parents=True)
    for step in (4, 5):
        (there / f"step-{step:08}").symlink_to(precious)
    with manager_of(tmp_path, keep_there=1) as manager:
        manager.save(5, state_of(5))
        assert not manager.wait_promoted(60)
        assert "is a symbolic link to" in str(manager.promotion_error)
        save(manager, 6)
    assert ringstow.load(precious)["step"] == 42
    ringstow.promote(tmp_path / "run/step-00000006", tmp_path / "there")
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    ringstow.promote(tmp_path / "run/step-00000006", tmp_path / "named")  # the caller names it
    assert ringstow.load(tmp_path / "elsewhere")["step"] == 6


def test_plain_copy_of_a_step_counts_as_its_copy(tmp_path):
    ringstow.save(state_of(1), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert ringstow.promote(tmp_path / "a", tmp_path / "b").was_there


def test_refusal_of_a_place_never_says_to_remove_what_is_there(tmp_path):
    ringstow.save(state_of(1), tmp_path / "older")
    ringstow.save(state_of(2), tmp_path / "newer")
    ringstow.promote(tmp_path / "newer", tmp_path / "there")
    for replaces in (False, True):
        with pytest.raises(FileExistsError, match="later than this one: it stays") as caught:
            ringstow.promote(tmp_path / "older", tmp_path / "there", replace_older=replaces)
        assert "remove" not in str(caught.value)
    ringstow.promote(tmp_path / "older", tmp_path / "other")
    with pytest.raises(FileExistsError, match="earlier than this one: `replace_older`"):
        ringstow.promote(tmp_path / "newer", tmp_path / "other")
    assert ringstow.load(tmp_path / "there")["step"] == 2


def test_damaged_copy_is_mended_by_the_next_one(tmp_path):
    path, there = tmp_path / "a", tmp_path / "shared/a"
    ringstow.save(state_of(1), path)
    ringstow.promote(path, there)
    [shard] = there.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:100])
    assert ringstow.promote(path, there).sent_bytes > 0
    assert ringstow.load(there)["step"] == 1
    assert len(list(there.iterdir())) == 2
    cut(there / "manifest.json")
    ringstow.promote(path, there, replace_older=True)
    assert ringstow.load(there)["step"] == 1


def test_step_of_which_all_copies_are_damaged_names_them(tmp_path, there):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2)
    copies = [place / "step-00000002" for place in (tmp_path / "run", there)]
    for copy in copies:
        ruin(copy)
    with manager_of(tmp_path) as manager:
        for named, remedies in ((None, ["on_corrupt"]), (2, [])):
            with pytest.raises(ringstow.CorruptCheckpointError, match=str(copies[1])) as caught:
                manager.restore(named)
            [first, *others] = caught.value.__notes__
            assert str(copies[0]) in first
            assert len(others) == len(remedies)
            assert all(remedy in note for remedy, note in zip(remedies, others, strict=True))
        assert manager.restore(on_corrupt="previous").step == 1
