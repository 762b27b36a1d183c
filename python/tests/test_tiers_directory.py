"""`CheckpointManager` with a directory on another disk behind its own."""

import shutil
import threading

import forked
import pytest
import torch
from tiered import (
    before_copies,
    manager_of,
    pause,
    save_step_1,
    save_step_2_again,
    state_of,
    steps_in,
)

import ringstow


def test_steps_are_copied_and_outlive_the_directory(tmp_path):
    there = tmp_path / "shared" / "run" / "step-00000002"
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert manager.wait_promoted(60)
        manager.save_async(2, state_of(2), metrics={"loss": 0.5})
    assert manager.promotion_error is None
    assert manager.promotion_report.to == str(there)
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path) as manager:
        restored = manager.restore()
    assert (restored.step, restored.path) == (2, str(there))
    assert restored.metrics == {"loss": 0.5}
    assert torch.equal(restored.state["w"], state_of(2)["w"])
    assert ringstow.verify(there).ok


def test_run_goes_on_in_the_directory_of_the_copies(tmp_path):
    save_step_1(tmp_path)
    with ringstow.CheckpointManager(tmp_path / "shared/run", keep=2) as manager:
        assert manager.restore().step == 1
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    assert steps_in(tmp_path / "shared/run") == [2, 3]


def test_what_the_nearest_copy_has_intact_is_restored(tmp_path, caplog):
    save_step_1(tmp_path)
    near = tmp_path / "run" / "step-00000001"
    with manager_of(tmp_path) as manager:
        assert manager.restore().path == str(near)
    [shard] = near.glob("*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    with manager_of(tmp_path) as manager:
        restored = manager.restore()  # on_corrupt="raise": it is the same step
    assert restored.path == str(near)
    assert torch.equal(restored.state["w"], state_of(1)["w"])
    assert f"shared/run/step-00000001/{shard.stem}" in caplog.text
    (near / "manifest.json").write_bytes(b"damaged")
    with manager_of(tmp_path) as manager:
        restored = manager.restore()
    assert restored.path == str(tmp_path / "shared/run/step-00000001")


def test_old_steps_leave_the_copies_by_their_own_rule(tmp_path):
    with manager_of(tmp_path, keep=1, keep_there=2) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step))
            manager.wait_promoted()
    assert steps_in(tmp_path / "run") == [4]
    assert steps_in(tmp_path / "shared/run") == [3, 4]


def test_step_that_is_saved_again_replaces_its_copy(tmp_path):
    save_step_2_again(manager_of(tmp_path))
    there = tmp_path / "shared/run/step-00000002"
    assert torch.equal(ringstow.load(there)["w"], state_of(2)["w"])
    assert len(list(there.glob("*.safetensors"))) == 1


def test_directory_and_store_are_both_tiers(tmp_path, bucket):
    tiers = [tmp_path / "shared", f"{bucket.url}/run"]
    with ringstow.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        manager.save(1, state_of(1))
    for where in (tmp_path / "shared", f"{bucket.url}/run"):
        assert steps_in(where) == [1]


SAVING = """
import sys, ringstow, torch
root, tier = sys.argv[1:]
manager = ringstow.CheckpointManager(root, tiers=ringstow.Tiers([tier], rate=1 << 20))
manager.save(1, {"w": torch.zeros(60 << 20, dtype=torch.uint8)})
manager.wait_promoted()
"""


def test_copy_that_a_kill_cut_short_is_ended_by_the_next_run(tmp_path):
    there = tmp_path / "shared/run/step-00000001"
    program = forked.Program(SAVING, tmp_path / "run", tmp_path / "shared/run")
    while not list(there.glob("*.part")):
        assert program.is_running()
    program.kill()
    program.wait()
    assert ringstow.latest(tmp_path / "shared/run") is None
    with manager_of(tmp_path) as manager:
        manager.restore()
    assert ringstow.latest(tmp_path / "shared/run").path == str(there)
    assert not list(there.glob("*.part"))
    assert ringstow.load(there)["w"].numel() == 60 << 20


def test_disk_that_refuses_fails_the_copy_and_not_the_save(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.wait_promoted()
        # A file where the next copy needs a directory.
        (tmp_path / "shared/run/step-00000002").write_text("")
        manager.save(2, state_of(2))
        assert not manager.wait_promoted(60)
        assert isinstance(manager.promotion_error, OSError)
        assert "`ringstow promote" in caplog.text
        manager.save(3, state_of(3))
    assert manager.promotion_error is None
    assert steps_in(tmp_path / "shared/run") == [1, 3]


def test_copy_that_failed_is_tried_a_last_time_when_the_manager_closes(tmp_path, caplog):
    in_the_way = tmp_path / "shared/run/step-00000001"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("")
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        in_the_way.unlink()
    assert "It is tried again in 30 s" in caplog.text
    assert manager.promotion_error is None
    assert steps_in(tmp_path / "shared/run") == [1]


def test_copy_that_failed_is_tried_again_until_the_store_is_back(tmp_path, monkeypatch):
    tries = []

    def away(path, to):
        tries.append(to)
        if len(tries) < 4:
            raise ConnectionRefusedError(to)

    before_copies(monkeypatch, away)
    pause(monkeypatch)
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        while not manager.wait_promoted(60):
            assert isinstance(manager.promotion_error, ConnectionRefusedError | None)
    assert len(tries) == 4
    assert steps_in(tmp_path / "shared/run") == [1]


def test_copy_that_waits_for_another_try_gives_way_to_a_newer_step(tmp_path, monkeypatch):
    def refuse_step_1(path, to):
        if to.endswith("1"):
            raise ConnectionRefusedError(to)

    before_copies(monkeypatch, refuse_step_1)
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        manager.save(2, state_of(2))
        assert manager.wait_promoted(60)
    assert steps_in(tmp_path / "shared/run") == [2]


@pytest.fixture
def held_copies(monkeypatch):
    """Hold all copies: return what says that one has begun, and what lets them go on."""
    begun, may_go = threading.Event(), threading.Event()

    def waiting(path, to):
        begun.set()
        assert may_go.wait(300)

    before_copies(monkeypatch, waiting)
    return begun, may_go


def test_step_after_going_back_does_not_give_way_to_older_ones_of_higher_numbers(
    tmp_path, held_copies
):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 7, 8, 9):
            manager.save(step, state_of(step))
        manager.restore(1)
        manager.save(2, state_of(2))
    begun, may_go = held_copies
    with manager_of(tmp_path, keep=9, keep_here=9) as manager:
        assert manager.restore().step == 2  # and has all steps copied
        assert begun.wait(300)
        manager.save(3, state_of(3))
        may_go.set()
        assert manager.wait_promoted(60)
        assert sorted(steps_in(tmp_path / "shared/run")) == [1, 2, 3, 7, 8, 9]


def test_steps_that_stay_for_good_are_not_passed_over(tmp_path, held_copies):
    begun, may_go = held_copies
    with manager_of(tmp_path, keep=ringstow.Retention(last=1, every=3)) as manager:
        manager.save(1, state_of(1))
        assert begun.wait(300)
        for step in range(2, 9):
            manager.save(step, state_of(step))
        may_go.set()
    assert steps_in(tmp_path / "shared/run") == [3, 6, 8]
    assert steps_in(tmp_path / "run") == [3, 6, 8]


def test_step_that_stays_for_good_is_tried_again_with_the_next(tmp_path, monkeypatch):
    tries = []

    def away(path, to):
        tries.append(to.rpartition("-")[2])
        if len(tries) == 1:
            raise ConnectionRefusedError(to)

    before_copies(monkeypatch, away)
    outcomes = []
    with (
        ringstow.on_done(outcomes.append, kinds=["promotion"]),
        manager_of(tmp_path, keep=ringstow.Retention(last=1, every=3)) as manager,
    ):
        manager.save(3, state_of(3))
        assert not manager.wait_promoted(60)
        manager.save(4, state_of(4))
        assert manager.wait_promoted(60)
    assert [int(number) for number in tries] == [3, 4, 3]  # the newest first
    assert steps_in(tmp_path / "shared/run") == [3, 4]
    assert [type(one.error) for one in outcomes] == [ConnectionRefusedError, type(None), type(None)]


def test_tier_that_cannot_be_claimed_is_a_failed_promotion(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/run").write_text("no directory")
    outcomes = []
    with (
        ringstow.on_done(outcomes.append, kinds=["promotion"]),
        manager_of(tmp_path) as manager,
    ):
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
    assert outcomes
    assert all(isinstance(one.error, OSError) for one in outcomes)
    assert outcomes[0].to == str(tmp_path / "shared/run/step-00000001")


def test_restore_with_the_help_of_a_copy_copies_nothing(tmp_path, caplog):
    save_step_1(tmp_path)
    [shard] = (tmp_path / "run" / "step-00000001").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with manager_of(tmp_path) as manager:
        assert torch.equal(manager.restore().state["w"], state_of(1)["w"])
        assert manager.wait_promoted(60)
        assert manager.promotion_error is None
    assert f"reading its copy {tmp_path}/shared/run/step-00000001/" in caplog.text
    assert "not copied" not in caplog.text


def test_wrong_tiers_say_what_is_meant(tmp_path):
    for tier in (tmp_path, tmp_path / "run", tmp_path / "run" / "x"):
        with pytest.raises(ringstow.InvalidStateError, match="one is in the other"):
            ringstow.CheckpointManager(tmp_path / "run", tiers=[tier])
    for tiers in ("/shared/run", tmp_path):
        with pytest.raises(TypeError, match="tiers is a list"):
            ringstow.CheckpointManager(tmp_path / "run", tiers=tiers)


def test_tiers_in_one_another_and_stripes_are_refused(tmp_path):
    striped = ringstow.Config(
        stripe=[tmp_path / "disk2"], files=2, block_bytes=4096, pool_bytes=1 << 20
    )
    for tiers, config in [
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


def test_copy_whose_manifest_is_gone_is_told(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted(60)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "shared/run/step-00000002/manifest.json").unlink()
    with manager_of(tmp_path) as manager:
        assert manager.restore().step == 1
    assert "step-00000002, whose manifest is gone" in caplog.text


def test_damaged_manifest_is_told_where_its_copy_is_restored(tmp_path, caplog):
    save_step_1(tmp_path)
    near = tmp_path / "run/step-00000001/manifest.json"
    near.write_bytes(near.read_bytes()[:-9])
    with manager_of(tmp_path) as manager:
        assert manager.restore().path.startswith(str(tmp_path / "shared"))
    assert f"{near} is damaged" in caplog.text


def test_step_that_somebody_removed_before_its_copy_is_an_error(tmp_path, monkeypatch):
    from ringstow._saving import _promote

    def promote(path, *args, **options):
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(_promote, "copied", promote)
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)


def test_copy_neither_replaces_nor_removes_what_a_planted_link_leads_to(tmp_path):
    precious = tmp_path / "precious"
    ringstow.save(state_of(42), precious, step=5)
    (tmp_path / "shared/run").mkdir(parents=True)
    for step in (4, 5):
        (tmp_path / f"shared/run/step-{step:08}").symlink_to(precious)
    with manager_of(tmp_path, keep_there=1) as manager:
        manager.save(5, state_of(5))
        assert not manager.wait_promoted(60)
        assert "is a symbolic link to" in str(manager.promotion_error)
        manager.save(6, state_of(6))
        assert manager.wait_promoted(60)
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
    (there / "manifest.json").write_bytes((there / "manifest.json").read_bytes()[:-9])
    ringstow.promote(path, there, replace_older=True)
    assert ringstow.load(there)["step"] == 1


def test_step_of_which_all_copies_are_damaged_names_them(tmp_path):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted(60)
    copies = [tmp_path / name / "step-00000002" for name in ("run", "shared/run")]
    for copy in copies:
        [shard] = copy.glob("*.safetensors")
        shard.write_bytes(bytes(shard.stat().st_size))
    with manager_of(tmp_path) as manager:
        for named, remedies in ((None, ["on_corrupt"]), (2, [])):
            with pytest.raises(ringstow.CorruptCheckpointError, match=str(copies[1])) as caught:
                manager.restore(named)
            [first, *others] = caught.value.__notes__
            assert str(copies[0]) in first
            assert len(others) == len(remedies)
            assert all(remedy in note for remedy, note in zip(remedies, others, strict=True))
        assert manager.restore(on_corrupt="previous").step == 1


def test_damaged_manifest_of_one_of_several_steps_is_told(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted(60)
    near = tmp_path / "run/step-00000002/manifest.json"
    near.write_bytes(near.read_bytes()[:-9])
    with manager_of(tmp_path) as manager:
        assert manager.restore().path == str(tmp_path / "shared/run/step-00000002")
    assert f"{near.parent} is damaged" in caplog.text
