"""Checkpoints in Google Cloud Storage: a double of its server, with a proxy that misbehaves."""

import pytest
import torch
from stores import faults
from test_promote import PARTS, assert_same, state_of
from tiered import state_of as state_of_step

import ringstow


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint's path and its state: one shard of three parts."""
    state, path = state_of(), tmp_path / "run" / "step-3"
    ringstow.save(state, path, step=3)
    return path, state


@pytest.mark.parametrize(
    ("fault", "method", "target"),
    [
        (faults.SlowDown(503, "ServiceUnavailable"), "PUT", "partNumber"),
        (faults.CutRequest(100_000), "PUT", "partNumber"),
        (faults.LoseAnswer(), "PUT", "partNumber"),
        (faults.LoseAnswer(), "POST", "uploadId"),
        (faults.LoseAnswer(), "PUT", "manifest.json"),
        (faults.SlowDown(503, "ServiceUnavailable"), "GET", "list-type"),
    ],
    ids=["busy", "cut", "part lost", "upload lost", "commit lost", "list"],
)
def test_passing_trouble_is_overcome(saved, google_bucket, proxy, fault, method, target):
    path, state = saved
    proxy.on(fault, method, target)
    ringstow.promote(path, f"{google_bucket.url}/x", part_bytes=PARTS)
    assert_same(ringstow.load(f"{google_bucket.url}/x"), state)
    assert not google_bucket.has_unfinished()


def test_promotion_goes_on_where_it_failed(saved, google_bucket, proxy):
    path, state = saved
    url = f"{google_bucket.url}/x"
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "partNumber", skip=2, times=None)
    with pytest.raises(PermissionError, match="the store answers 403 .*AccessDenied"):
        ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    proxy.clear()
    assert google_bucket.has_unfinished()
    report = ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert len(proxy.requests("PUT", "partNumber")) == 1
    assert 0 < report.sent_bytes < PARTS
    assert_same(ringstow.load(url), state)
    assert not google_bucket.has_unfinished()


def test_upload_that_the_store_has_dropped_begins_again(saved, google_bucket, proxy):
    path, state = saved
    url = f"{google_bucket.url}/x"
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "partNumber", skip=2, times=None)
    with pytest.raises(PermissionError):
        ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    proxy.clear()
    google_bucket.server.uploads.clear()
    ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert_same(ringstow.load(url), state)


def test_prune_aborts_the_upload_of_a_checkpoint_that_is_gone(saved, google_bucket, proxy):
    path, _ = saved
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "partNumber", skip=2, times=None)
    with pytest.raises(PermissionError):
        ringstow.promote(path, f"{google_bucket.url}/x", part_bytes=PARTS, uploads=1)
    proxy.clear()
    ringstow.remove(path)
    assert not ringstow.prune(path.parent).left
    assert not google_bucket.has_unfinished()
    assert google_bucket.keys() == []


def test_step_that_is_saved_again_replaces_its_copy(tmp_path, google_bucket):
    tiers = [f"{google_bucket.url}/run"]
    with ringstow.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        for number in (1, 2):
            manager.save(7, state_of_step(number))
            assert manager.wait_promoted(60)
    assert manager.promotion_error is None
    assert torch.equal(ringstow.load(f"{tiers[0]}/step-00000007")["w"], state_of_step(2)["w"])
    assert len(google_bucket.keys()) == 3  # shard, manifest, whose run it is


def test_removal_whose_answer_is_lost_is_no_failure(tmp_path, google_bucket, proxy):
    url = f"{google_bucket.url}/x"
    ringstow.save(state_of_step(1), tmp_path / "1")
    ringstow.promote(tmp_path / "1", url)
    proxy.on(faults.LoseAnswer(), "DELETE", "manifest.json")
    ringstow.remove(url)
    assert google_bucket.keys() == []


def test_store_that_knows_no_conditional_removal_is_asked_without(tmp_path, google_bucket, proxy):
    url = f"{google_bucket.url}/x"
    ringstow.save(state_of_step(1), tmp_path / "1")
    ringstow.promote(tmp_path / "1", url)
    proxy.on(faults.Refuse(501, "NotImplemented"), "DELETE", "manifest.json")
    ringstow.remove(url)
    assert google_bucket.keys() == []


def test_removal_leaves_shards_that_its_manifest_does_not_list(tmp_path, google_bucket):
    """Another promotion may be sending them."""
    url = f"{google_bucket.url}/x"
    for number in (1, 2):
        ringstow.save(state_of_step(number), tmp_path / f"{number}")
    ringstow.promote(tmp_path / "1", url)
    ringstow.promote(tmp_path / "2", tmp_path / "there")
    [shard] = (tmp_path / "there").glob("*.safetensors")
    google_bucket.put(f"x/{shard.name}", shard.read_bytes())
    [left] = ringstow.remove(url).left
    assert "perhaps another copy is being sent" in left.reason
    assert google_bucket.keys() == [f"x/{shard.name}"]
    ringstow.remove(url)
    assert google_bucket.keys() == []


def test_more_objects_than_a_page_are_listed(google_bucket, monkeypatch):
    from stores import google

    monkeypatch.setattr(google, "PAGE", 3)
    for step in range(8):
        google_bucket.put(f"run/step-{step}/manifest.json", b"no manifest")
    assert len(ringstow.steps(f"{google_bucket.url}/run")) == 8


def test_wrong_bucket_and_missing_tls_say_so(saved, google_bucket, monkeypatch):
    path, _ = saved
    with pytest.raises(FileNotFoundError, match="404 .*NoSuchBucket"):
        ringstow.promote(path, "gs://nowhere/x")
    monkeypatch.delenv("GOOGLE_ALLOW_HTTP")
    with pytest.raises(OSError, match="GOOGLE_ALLOW_HTTP"):
        ringstow.promote(path, f"{google_bucket.url}/x")
