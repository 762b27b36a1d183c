"""`CheckpointManager` with object stores behind its directory."""

import shutil

import forked
import pytest
import torch
from stores import faults
from tiered import save_step_2_again, state_of

import ringstow


def manager_of(tmp_path, bucket, **options):
    return ringstow.CheckpointManager(tmp_path / "run", tiers=[f"{bucket.url}/run"], **options)


def test_steps_are_copied_and_outlive_the_directory(tmp_path, bucket):
    with manager_of(tmp_path, bucket) as manager:
        manager.save(1, state_of(1))
        assert manager.wait_promoted(60)
        manager.save_async(2, state_of(2), metrics={"loss": 0.5})
    assert manager.promotion_error is None
    assert manager.promotion_report.to == f"{bucket.url}/run/step-00000002"
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path, bucket) as manager:
        restored = manager.restore()
    assert (restored.step, restored.path) == (2, f"{bucket.url}/run/step-00000002")
    assert restored.metrics == {"loss": 0.5}
    assert torch.equal(restored.state["w"], state_of(2)["w"])


def test_nearest_copy_is_restored(tmp_path, bucket, proxy):
    with manager_of(tmp_path, bucket) as manager:
        manager.save(1, state_of(1))
    proxy.clear()
    with manager_of(tmp_path, bucket) as manager:
        restored = manager.restore()
    assert restored.path == str(tmp_path / "run" / "step-00000001")
    assert not proxy.requests("GET", r"safetensors")


def test_newer_step_of_a_farther_tier_wins(tmp_path, bucket):
    with manager_of(tmp_path, bucket) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted()
    ringstow.remove(tmp_path / "run" / "step-00000002")
    with manager_of(tmp_path, bucket) as manager:
        assert manager.restore().step == 2
        assert manager.restore(1).path == str(tmp_path / "run" / "step-00000001")


def test_damaged_chunk_comes_from_the_next_tier_with_a_warning(tmp_path, bucket, caplog):
    with manager_of(tmp_path, bucket) as manager:
        manager.save(1, state_of(1))
    [shard] = (tmp_path / "run").glob("*/*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    with manager_of(tmp_path, bucket) as manager:
        restored = manager.restore()  # on_corrupt="raise": it is the same step
    assert restored.path == str(shard.parent)
    assert torch.equal(restored.state["w"], state_of(1)["w"])
    assert f"its copy {bucket.url}/run/step-00000001/" in caplog.text


def test_silent_store_fails_the_restore_and_not_the_save(tmp_path, bucket, proxy, caplog):
    refused = faults.Refuse(403, "AccessDenied")
    with manager_of(tmp_path, bucket) as manager:
        proxy.on(refused, times=None)
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
    there = [found.step for found in ringstow.steps(f"{bucket.url}/run")]
    assert there == [1, 4]
    assert "and comes first" in caplog.text
    assert torch.equal(ringstow.load(f"{bucket.url}/run/step-00000001")["w"], state_of(1)["w"])


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


def test_wrong_tiers_say_what_is_meant(tmp_path):
    with pytest.raises(TypeError, match=r'tiers=\["s3://b"\]'):
        ringstow.CheckpointManager(tmp_path, tiers="s3://b")


def test_step_that_no_tier_has_is_named_with_the_tiers(tmp_path, bucket):
    with (
        manager_of(tmp_path, bucket) as manager,
        pytest.raises(
            ringstow.NoCheckpointError,
            match=r"run and s3://.*/run have no step 7; their steps: none yet",
        ),
    ):
        manager.restore(7)


def test_old_steps_leave_the_store_by_its_own_rule(tmp_path, bucket):
    tiers = ringstow.Tiers([f"{bucket.url}/run"], keep=2)
    rules = ringstow.Retention(last=1, every=4)
    with ringstow.CheckpointManager(tmp_path / "run", keep=rules, tiers=tiers) as manager:
        for step in range(1, 7):
            manager.save(step, state_of(step))
            manager.wait_promoted()
    assert [found.step for found in ringstow.steps(tmp_path / "run")] == [4, 6]
    assert [found.step for found in ringstow.steps(f"{bucket.url}/run")] == [4, 5, 6]
    assert len([key for key in sorted(bucket.keys()) if key.endswith(".safetensors")]) == 3


def test_step_leaves_the_store_manifest_first(tmp_path, bucket, proxy):
    with manager_of(tmp_path, bucket) as manager:
        manager.save(1, state_of(1))
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


def test_step_that_is_saved_again_replaces_its_copy(tmp_path, bucket):
    """A run goes back to step 1, and saves step 2 a second time."""
    save_step_2_again(manager_of(tmp_path, bucket))
    url = f"{bucket.url}/run/step-00000002"
    assert torch.equal(ringstow.load(url)["w"], state_of(2)["w"])
    assert len([key for key in bucket.keys("run/step-00000002") if "safetensors" in key]) == 1


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
        [shard] = (tmp_path / "run").glob("*/*.safetensors")
        shard.write_bytes(bytes(shard.stat().st_size))
        with pytest.raises(ringstow.CorruptCheckpointError):
            manager.restore()


def test_damaged_newest_step_of_a_lost_node_is_an_error_not_a_step_less(tmp_path, bucket):
    with manager_of(tmp_path, bucket) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted()
    shutil.rmtree(tmp_path / "run")
    [shard] = [key for key in bucket.keys("run/step-00000002") if "safetensors" in key]
    bucket.delete(shard)
    with manager_of(tmp_path, bucket) as manager:
        with pytest.raises(ringstow.MissingFilesError):
            manager.restore()
        assert manager.restore(1).step == 1


def test_missing_file_comes_from_the_next_tier(tmp_path, bucket):
    with manager_of(tmp_path, bucket) as manager:
        manager.save(1, state_of(1))
    [shard] = (tmp_path / "run").glob("*/*.safetensors")
    shard.unlink()
    with manager_of(tmp_path, bucket) as manager:
        restored = manager.restore()
    assert torch.equal(restored.state["w"], state_of(1)["w"])
    assert restored.path == str(shard.parent)


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


@pytest.mark.parametrize("what", ["manifest.json", "safetensors"])
def test_garbled_newest_step_of_a_lost_node_is_an_error(tmp_path, bucket, what):
    with manager_of(tmp_path, bucket) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait_promoted()
    shutil.rmtree(tmp_path / "run")
    [key] = [key for key in bucket.keys("run/step-00000002") if what in key]
    bucket.put(key, b"rubbish")
    with manager_of(tmp_path, bucket) as manager:
        with pytest.raises((ringstow.CorruptCheckpointError, ringstow.FormatError)):
            manager.restore()
        assert manager.restore(on_corrupt="previous").step == 1


def test_fresh_run_restores_nothing_and_a_lost_node_saves_without_a_complaint(
    tmp_path, bucket, caplog
):
    with manager_of(tmp_path, bucket, keep=2) as manager:
        assert manager.restore() is None
        manager.save(1, state_of(1))
    shutil.rmtree(tmp_path / "run")
    with manager_of(tmp_path, bucket, keep=2) as manager:
        assert manager.restore().step == 1
        manager.save(2, state_of(2))
    assert "ERROR" not in [record.levelname for record in caplog.records]


def test_manager_restores_from_its_tier_which_keeps_the_newest(tmp_path, place):
    tiers = [f"{place.url}/run"]
    with ringstow.CheckpointManager(
        tmp_path / "run", tiers=ringstow.Tiers(tiers, keep=2)
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            assert manager.wait_promoted(60)
    assert manager.promotion_error is None
    assert [found.step for found in ringstow.steps(tiers[0])] == [2, 3]
    assert ringstow.latest(tiers[0]).path == f"{tiers[0]}/step-00000003"
    shutil.rmtree(tmp_path / "run")
    with ringstow.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        restored = manager.restore()
    assert (restored.step, restored.path) == (3, f"{tiers[0]}/step-00000003")
    assert torch.equal(restored.state["w"], state_of(3)["w"])
