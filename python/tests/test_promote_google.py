"""What only Google Cloud Storage does with checkpoints; `test_promote` has what all stores do."""

import torch
from stores import faults
from tiered import state_of as state_of_step

import ringstow


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
