"""What only Google Cloud Storage does with checkpoints; `test_promote` has what all stores do."""

import pytest
from stores import faults, google
from tiered import state_of

import ringstow


@pytest.mark.parametrize(
    "trouble",
    [faults.LoseAnswer(), faults.Refuse(501, "NotImplemented")],
    ids=["its answer is lost", "the store knows no conditional removal"],
)
def test_removal_succeeds_although(tmp_path, google_bucket, proxy, trouble):
    url = f"{google_bucket.url}/x"
    ringstow.save(state_of(1), tmp_path / "1")
    ringstow.promote(tmp_path / "1", url)
    proxy.on(trouble, "DELETE", "manifest.json")
    ringstow.remove(url)
    assert google_bucket.keys() == []


def test_removal_leaves_shards_that_its_manifest_does_not_list(tmp_path, google_bucket):
    """Another promotion may be sending them."""
    url = f"{google_bucket.url}/x"
    for number in (1, 2):
        ringstow.save(state_of(number), tmp_path / f"{number}")
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
    monkeypatch.setattr(google, "PAGE", 3)
    for step in range(8):
        google_bucket.put(f"run/step-{step}/manifest.json", b"no manifest")
    assert len(ringstow.steps(f"{google_bucket.url}/run")) == 8
