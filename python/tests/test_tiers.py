"""`CheckpointManager` with object stores or a directory on another disk behind its directory."""

import shutil

import forked
import pytest
from stores import faults
from tiered import is_of, ruin, save, state_of, steps_in

import ringstow


@pytest.fixture(params=["directory", "s3"])
def tier(request, tmp_path):
    """Return a tier of each kind: a directory, and a URL in a store."""
    if request.param == "directory":
        return str(tmp_path / "shared/run")
    return f"{request.getfixturevalue('bucket').url}/run"


def manager_of(tmp_path, tier, *, keep_there=None, **options):
    url = tier if isinstance(tier, str) else f"{tier.url}/run"
    tiers = ringstow.Tiers([url], keep=keep_there)
    return ringstow.CheckpointManager(tmp_path / "run", tiers=tiers, **options)


def shards_in(bucket, prefix=""):
    return [key for key in bucket.keys(prefix) if key.endswith(".safetensors")]


# Of each kind


def test_steps_are_copied_and_outlive_the_directory(tmp_path, tier):
    with manager_of(tmp_path, tier) as manager:
        save(manager, 1)
        manager.save_async(2, state_of(2), metrics={"loss": 0.5})
    assert manager.promotion_error is None
    assert manager.promotion_report.to == f"{tier}/step-00000002"
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path, tier) as manager:
        restored = manager.restore()
    assert (restored.step, restored.path) == (2, f"{tier}/step-00000002")
    assert restored.metrics == {"loss": 0.5}
    assert is_of(restored.state, 2)
    assert ringstow.verify(restored.path).ok


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_what_the_nearest_copy_lacks_comes_from_the_next_tier(tmp_path, tier, caplog, harm):
    with manager_of(tmp_path, tier) as manager:
        save(manager, 1)
    shard = ruin(tmp_path / "run/step-00000001")
    if harm == "missing":
        shard.unlink()
    with manager_of(tmp_path, tier) as manager:
        restored = manager.restore()  # on_corrupt="raise": it is the same step
    assert restored.path == str(shard.parent)
    assert is_of(restored.state, 1)
    assert f"its copy {tier}/step-00000001/{shard.stem}" in caplog.text


def test_old_steps_leave_the_copies_by_their_own_rule(tmp_path, tier):
    rules = ringstow.Retention(last=1, every=4)
    with manager_of(tmp_path, tier, keep=rules, keep_there=2) as manager:
        save(manager, *range(1, 7))
    assert steps_in(tmp_path / "run") == [4, 6]
    assert steps_in(tier) == [4, 5, 6]


@pytest.mark.parametrize("kind", ["directory", "bucket", "google_bucket"])
def test_step_that_is_saved_again_replaces_its_copy(tmp_path, request, kind):
    """A run goes back to step 1, and saves step 20 a second time."""
    place = None if kind == "directory" else request.getfixturevalue(kind)
    tier = str(tmp_path / "shared/run") if place is None else f"{place.url}/run"
    with manager_of(tmp_path, tier) as manager:
        manager.save(1, state_of(1))
        save(manager, 20)
        manager.restore(1)
        manager.save(20, state_of(2))
    assert manager.promotion_error is None
    assert is_of(ringstow.load(f"{tier}/step-00000020"), 2)
    if place is None:
        shards = list((tmp_path / "shared/run/step-00000020").glob("*.safetensors"))
    else:
        shards = shards_in(place, "run/step-00000020")
    assert len(shards) == 1


# Stores


def test_nearest_copy_is_restored(tmp_path, bucket, proxy):
    with manager_of(tmp_path, bucket) as manager:
        save(manager, 1)
    proxy.clear()
    with manager_of(tmp_path, bucket) as manager:
        assert manager.restore().path == str(tmp_path / "run" / "step-00000001")
    assert not proxy.requests("GET", r"safetensors")


def test_newer_step_of_a_farther_tier_wins(tmp_path, bucket):
    with manager_of(tmp_path, bucket) as manager:
        save(manager, 1, 2)
    ringstow.remove(tmp_path / "run" / "step-00000002")
    with manager_of(tmp_path, bucket) as manager:
        assert manager.restore().step == 2
        assert manager.restore(1).path == str(tmp_path / "run" / "step-00000001")


def test_silent_store_fails_the_restore_and_not_the_save(tmp_path, bucket, proxy, caplog):
    with manager_of(tmp_path, bucket) as manager:
        proxy.on(faults.Refuse(403, "AccessDenied"), times=None)
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        assert isinstance(manager.promotion_error, PermissionError)
        assert "ringstow promote" in caplog.text
        # The store may have a newer step.
        with pytest.raises(PermissionError):
            manager.restore()
        proxy.clear()
        manager.save(2, state_of(2))
    assert manager.promotion_error is None
    assert ringstow.latest(f"{bucket.url}/run").path.endswith("step-00000002")


def test_slow_store_holds_up_no_save_and_newer_steps_overtake(tmp_path, bucket, proxy, caplog):
    with manager_of(tmp_path, bucket, keep=1) as manager:
        held = proxy.on(faults.Hold(), "PUT", "safetensors")
        manager.save(1, state_of(1))
        held.wait()
        for step in (2, 3, 4):
            manager.save(step, state_of(step))
        held.release()
    assert steps_in(f"{bucket.url}/run") == [1, 4]
    assert "and comes first" in caplog.text
    assert is_of(ringstow.load(f"{bucket.url}/run/step-00000001"), 1)


SAVING = """
import sys, ringstow, torch
root, tier = sys.argv[1:]
manager = ringstow.CheckpointManager(root, tiers=[tier])
manager.save(1, {"w": torch.ones(1000)})
manager.wait_promoted()
"""


def test_copy_that_a_kill_cut_short_is_ended_by_the_next_run(tmp_path, bucket, proxy, monkeypatch):
    held = proxy.on(faults.Hold(), "PUT", "manifest.json")
    program = forked.Program(SAVING, tmp_path / "run", f"{bucket.url}/run")
    held.wait()
    program.kill()
    program.wait()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)  # what is held stays held
    assert ringstow.latest(f"{bucket.url}/run") is None
    with manager_of(tmp_path, bucket) as manager:
        manager.restore()
    assert ringstow.latest(f"{bucket.url}/run").path.endswith("step-00000001")


def test_step_that_no_tier_has_is_named_with_the_tiers(tmp_path, bucket):
    match = r"run and s3://.*/run have no step 7; their steps: none yet"
    with (
        manager_of(tmp_path, bucket) as manager,
        pytest.raises(ringstow.NoCheckpointError, match=match),
    ):
        manager.restore(7)


def test_step_leaves_the_store_manifest_first(tmp_path, bucket, proxy):
    with manager_of(tmp_path, bucket) as manager:
        save(manager, 1)
    url = f"{bucket.url}/run/step-00000001"
    bucket.put("run/step-00000001/notes.txt", b"mine")
    proxy.on(faults.Refuse(403, "AccessDenied"), "DELETE", "safetensors")
    with pytest.raises(PermissionError, match="removing: the store answers 403 .*: 's3://"):
        ringstow.remove(url)
    with pytest.raises(ringstow.NotCommittedError):
        ringstow.load(url)
    report = ringstow.remove(url)
    assert [left.path for left in report.left] == [f"{url}/notes.txt"]
    assert bucket.keys("run/step") == ["run/step-00000001/notes.txt"]
    with pytest.raises(ringstow.NoCheckpointError):
        ringstow.remove(url)


def test_older_checkpoint_never_replaces_a_newer_one(tmp_path, bucket):
    for number in (1, 2):
        ringstow.save(state_of(number), tmp_path / str(number))
    url = f"{bucket.url}/x"
    ringstow.promote(tmp_path / "1", url)
    ringstow.promote(tmp_path / "2", url, replace_older=True)
    with pytest.raises(FileExistsError):
        ringstow.promote(tmp_path / "1", url, replace_older=True)
    assert ringstow.load(url)["step"] == 2


def test_another_save_of_the_number_is_no_copy(tmp_path, bucket):
    """Damage to a step is not passed over for an older save of the same number."""
    for number in (1, 2):
        ringstow.save(state_of(number), tmp_path / str(number), step=5)
    ringstow.promote(tmp_path / "1", f"{bucket.url}/run/step-00000005")
    (tmp_path / "run").mkdir()
    (tmp_path / "2").rename(tmp_path / "run" / "step-00000005")
    with manager_of(tmp_path, bucket) as manager:
        assert manager.restore().state["step"] == 2
        ruin(tmp_path / "run" / "step-00000005")
        with pytest.raises(ringstow.CorruptCheckpointError):
            manager.restore()


@pytest.mark.parametrize("harm", ["no shard", "garbled shard", "garbled manifest"])
def test_damaged_newest_step_of_a_lost_node_is_an_error_not_a_step_less(tmp_path, bucket, harm):
    with manager_of(tmp_path, bucket) as manager:
        save(manager, 1, 2)
    shutil.rmtree(tmp_path / "run")
    what = "manifest.json" if harm == "garbled manifest" else "safetensors"
    [key] = [key for key in bucket.keys("run/step-00000002") if what in key]
    errors = (ringstow.CorruptCheckpointError, ringstow.FormatError)
    if harm == "no shard":
        bucket.delete(key)
        errors = ringstow.MissingFilesError
    else:
        bucket.put(key, b"rubbish")
    with manager_of(tmp_path, bucket) as manager:
        with pytest.raises(errors):
            manager.restore()
        assert manager.restore(1).step == 1
        if harm != "no shard":
            assert manager.restore(on_corrupt="previous").step == 1


def test_missing_bucket_is_no_empty_run(tmp_path, proxy, bucket):
    proxy.on(faults.Refuse(404, "NoSuchBucket"), "GET", "list-type", times=None)
    with manager_of(tmp_path, bucket) as manager, pytest.raises(FileNotFoundError):
        manager.restore()
    with pytest.raises(FileNotFoundError):
        ringstow.latest(f"{bucket.url}/run")


def test_secret_in_a_tier_is_refused_and_not_told(tmp_path):
    with pytest.raises(ringstow.InvalidStateError) as caught:
        ringstow.CheckpointManager(tmp_path, tiers=["s3://key:secret@bucket/run"])
    assert "secret" not in str(caught.value)


def test_fresh_run_restores_nothing_and_a_lost_node_saves_silently(tmp_path, bucket, caplog):
    with manager_of(tmp_path, bucket, keep=2) as manager:
        assert manager.restore() is None
        manager.save(1, state_of(1))
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path, bucket, keep=2) as manager:
        assert manager.restore().step == 1
        manager.save(2, state_of(2))
    assert "ERROR" not in [record.levelname for record in caplog.records]


def test_manager_restores_from_its_tier_which_keeps_the_newest(tmp_path, place):
    tier = f"{place.url}/run"
    with manager_of(tmp_path, tier, keep_there=2) as manager:
        save(manager, 1, 2, 3)
    assert manager.promotion_error is None
    assert steps_in(tier) == [2, 3]
    assert ringstow.latest(tier).path == f"{tier}/step-00000003"
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path, tier) as manager:
        restored = manager.restore()
    assert (restored.step, restored.path) == (3, f"{tier}/step-00000003")
    assert is_of(restored.state, 3)
