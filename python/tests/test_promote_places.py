"""Copies in object stores whose place others want, too, and stores that are away for a while."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stores import faults
from test_promote import shards_of

import ringstow


def state_of(seed):
    torch.manual_seed(seed)
    return {"w": torch.randn(2 << 18), "seed": seed}


@pytest.fixture
def saved(tmp_path):
    """Return the paths of three checkpoints, each newer than the one before."""
    paths = [tmp_path / name / "step-1" for name in ("a", "b", "c")]
    for seed, path in enumerate(paths):
        ringstow.save(state_of(seed), path, step=1)
    return paths


def assert_alone(bucket, url, seed):
    """Check that a place has this checkpoint, and nothing of another one."""
    assert ringstow.load(url)["seed"] == seed
    assert ringstow.verify(url).ok
    assert len(shards_of(bucket)) == 1
    assert not bucket.has_unfinished()


def promoted_beside(proxy, held_path, path, url, **how):
    """Promote one checkpoint while another one waits for its commit; return that one's error."""
    held = proxy.on(faults.Hold(), "PUT", "manifest.json")
    with ThreadPoolExecutor() as threads:
        other = threads.submit(ringstow.promote, held_path, url, **how)
        held.wait()
        ringstow.promote(path, url, **how)
        held.release()
        return other.exception()


@pytest.mark.parametrize("waits", ["older", "newer"])
def test_newer_of_two_that_replace_one_at_once_gets_the_place(saved, bucket, proxy, waits):
    oldest, *two = saved
    url = f"{bucket.url}/x"
    ringstow.promote(oldest, url)
    held, path = two if waits == "older" else two[::-1]
    error = promoted_beside(proxy, held, path, url, replace_older=True)
    if waits == "older":
        assert isinstance(error, FileExistsError)
        assert "another checkpoint is there, a save of step 1" in str(error)
        assert "later than this one" in str(error)
    else:
        assert error is None
    assert_alone(bucket, url, 2)


def test_place_is_replaced_on_each_server(saved, each_bucket):
    url = f"{each_bucket.url}/x"
    for path in saved:
        ringstow.promote(path, url, replace_older=True)
    assert_alone(each_bucket, url, 2)


def test_answer_of_a_replacement_that_is_lost_is_no_failure(saved, bucket, proxy):
    url = f"{bucket.url}/x"
    ringstow.promote(saved[0], url)
    proxy.on(faults.LoseAnswer(), "PUT", "manifest.json")
    ringstow.promote(saved[1], url, replace_older=True)
    assert_alone(bucket, url, 1)


def test_shards_of_a_replaced_checkpoint_go_with_the_next_promotion(saved, bucket, proxy):
    url = f"{bucket.url}/x"
    ringstow.promote(saved[0], url)
    proxy.on(faults.Refuse(403, "AccessDenied"), "DELETE", times=None)
    ringstow.promote(saved[1], url, replace_older=True)
    assert len(shards_of(bucket)) == 2
    proxy.clear()
    ringstow.promote(saved[1], url)
    assert_alone(bucket, url, 1)


@pytest.mark.parametrize("each_place", ["moto", "google"], indirect=True)  # s3s knows no condition
def test_removal_leaves_what_was_committed_meanwhile(saved, each_place, proxy):
    url = f"{each_place.url}/x"
    ringstow.promote(saved[0], url)
    held = proxy.on(faults.Hold(), "DELETE", "manifest.json")
    with ThreadPoolExecutor() as threads:
        removal = threads.submit(ringstow.remove, url)
        held.wait()
        ringstow.promote(saved[1], url, replace_older=True)
        held.release()
        assert isinstance(removal.exception(), ringstow.BusyError)
    assert_alone(each_place, url, 1)


def test_store_that_nobody_listens_for_is_told_with_the_time(saved, bucket, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(OSError, match="nobody listens") as caught:
        ringstow.promote(saved[0], f"{bucket.url}/x", patience=0)
    assert "tried for " in str(caught.value)
    assert "promote again: what was sent is not sent again" in str(caught.value)


def test_store_that_comes_back_gets_the_copy(saved, bucket, proxy, caplog):
    caplog.set_level(logging.WARNING, "ringstow")
    url = f"{bucket.url}/x"
    proxy.on(faults.SlowDown(), times=None)
    with ThreadPoolExecutor() as threads:
        copy = threads.submit(ringstow.promote, saved[0], url)
        while "trying again for 180 s at most" not in caplog.text:
            assert not copy.done()
        proxy.clear()
        copy.result()
    assert_alone(bucket, url, 0)


def test_patience_is_a_time():
    with pytest.raises(ValueError, match="patience=-1"):
        ringstow.promote("run/step-1", "s3://bucket/x", patience=-1)
