"""Checkpoints in object stores: on servers of each kind, with a proxy in front that misbehaves."""

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from stores import faults
from support import assert_same, flip
from tiered import state_of as state_of_step
from tiered import steps_in

import ringstow
import ringstow.dcp

PARTS = 5 << 20  # the smallest part that stores take


def state_of(megabytes=12, seed=0):
    torch.manual_seed(seed)
    return {"w": torch.randn(megabytes << 18), "small": [torch.arange(5), 7], "step": 3}


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint's path and its state: one shard of three parts."""
    state, path = state_of(), tmp_path / "run" / "step-3"
    ringstow.save(state, path, step=3)
    return path, state


# How each kind of store names a part of an object that is sent, and what it says when it refuses.
PART_OF = {"s3": "partNumber", "gs": "partNumber", "az": "comp=block&"}
DENIED = {"s3": "AccessDenied", "gs": "AccessDenied", "az": "AuthorizationFailure"}


def fail_at_part_3(proxy, place, path, url):
    """Send two parts of three, one after the other."""
    code = DENIED[place.scheme]
    proxy.on(faults.Refuse(403, code), "PUT", PART_OF[place.scheme], skip=2, times=None)
    with pytest.raises(PermissionError, match=f"the store answers 403 .*{code}") as caught:
        ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    proxy.clear()
    assert place.has_unfinished()
    return caught.value


def drop_what_was_sent(place):
    """Forget the parts of an unfinished object, as stores do after days."""
    if place.scheme == "s3":
        [(upload, key)] = place.uploads().items()
        place.request("DELETE", key, uploadId=upload)
    elif place.scheme == "az":
        [begun] = place.begun()
        assert place.blocks(begun) == 2
        place.put(begun, b"")
        place.delete(begun)
    else:
        place.server.uploads.clear()


def shards_of(bucket):
    return [key for key in sorted(bucket.keys()) if key.endswith(".safetensors")]


def test_promoted_checkpoint_loads_by_its_url(saved, each_place):
    path, state = saved
    url = f"{each_place.url}/run/step-3"
    report = ringstow.promote(path, url, part_bytes=PARTS)
    assert report.sent_bytes == report.file_bytes > 12 << 20
    assert not report.was_there
    assert_same(ringstow.load(url), state)
    assert ringstow.verify(url).ok
    with ringstow.open(url) as checkpoint:
        assert torch.equal(checkpoint["w"][5:9], state["w"][5:9])
    into = {"w": torch.zeros(12 << 18), "small": [torch.zeros(5, dtype=torch.int64), 0], "step": 0}
    ringstow.load_into(into, url)
    assert_same(into, state)
    into = {"w": torch.zeros_like(state["w"])}
    dcp.load(into, storage_reader=ringstow.dcp.StorageReader(url), no_dist=True)
    assert torch.equal(into["w"], state["w"])
    assert not each_place.has_unfinished()
    assert os.listdir(path.parent) == ["step-3"]  # no journal is left


def test_second_promotion_sends_nothing(saved, place, proxy):
    path, _ = saved
    ringstow.promote(path, f"{place.url}/x")
    proxy.clear()
    report = ringstow.promote(path, f"{place.url}/x")
    assert (report.was_there, report.sent_bytes) == (True, 0)
    assert not proxy.requests("PUT")
    assert not proxy.requests("POST")


def test_two_checkpoints_cannot_get_one_url(saved, place, tmp_path):
    path, state = saved
    other = tmp_path / "other"
    ringstow.save(state_of(seed=1), other)
    ringstow.promote(path, f"{place.url}/x")
    with pytest.raises(FileExistsError, match="another checkpoint is there"):
        ringstow.promote(other, f"{place.url}/x")
    assert_same(ringstow.load(f"{place.url}/x"), state)


def test_loser_of_a_race_does_not_harm_the_winner(saved, place, proxy, tmp_path):
    """The other checkpoint is promoted to the URL when all but the manifest is sent."""
    path, _ = saved
    other, winner = tmp_path / "other", state_of(seed=1)
    ringstow.save(winner, other)
    held = proxy.on(faults.Hold(), "PUT", "manifest.json")
    with ThreadPoolExecutor() as threads:
        lost = threads.submit(ringstow.promote, path, f"{place.url}/x")
        held.wait()
        ringstow.promote(other, f"{place.url}/x")
        held.release()
        assert isinstance(lost.exception(), FileExistsError)
    assert_same(ringstow.load(f"{place.url}/x"), winner)
    assert len(shards_of(place)) == 1
    assert not place.has_unfinished()


BUSY = faults.SlowDown(503, "ServiceUnavailable")
TROUBLE = {
    "s3s": [
        (faults.SlowDown(), "PUT", "partNumber=2"),
        (faults.SlowDown(), "POST", "uploads"),
        (faults.SlowDown(), "GET", "list-type"),
        (faults.CutRequest(100_000), "PUT", "partNumber=1"),
        (faults.LoseAnswer(), "PUT", "partNumber=3"),
        (faults.LoseAnswer(), "PUT", "manifest.json"),
        # The server refuses a part whose hash is not the signed one.
        (faults.Corrupt(1000, request=True), "PUT", "partNumber=2"),
        (faults.Refuse(409, "ConditionalRequestConflict"), "PUT", "manifest.json"),
    ],
    "azurite": [
        (faults.SlowDown(503, "ServerBusy"), "PUT", "comp=block&"),
        (faults.CutRequest(100_000), "PUT", "comp=block&"),
        (faults.LoseAnswer(), "PUT", "comp=blocklist"),
        (faults.LoseAnswer(), "PUT", "manifest.json"),
    ],
    "google": [
        (BUSY, "PUT", "partNumber"),
        (BUSY, "GET", "list-type"),
        (faults.CutRequest(100_000), "PUT", "partNumber"),
        (faults.LoseAnswer(), "PUT", "partNumber"),
        (faults.LoseAnswer(), "POST", "uploadId"),
        (faults.LoseAnswer(), "PUT", "manifest.json"),
    ],
}


@pytest.mark.parametrize(
    ("place", "fault", "method", "target"),
    [(server, *trouble) for server, rows in TROUBLE.items() for trouble in rows],
    indirect=["place"],
    ids=lambda value: type(value).__name__ if isinstance(value, faults.Fault) else value,
)
def test_passing_trouble_is_overcome(saved, place, proxy, fault, method, target):
    path, state = saved
    proxy.on(fault, method, target)
    ringstow.promote(path, f"{place.url}/x", part_bytes=PARTS)
    assert_same(ringstow.load(f"{place.url}/x"), state)
    assert not place.has_unfinished()


def test_promotion_goes_on_where_it_failed(saved, place, proxy):
    path, state = saved
    url = f"{place.url}/x"
    error = fail_at_part_3(proxy, place, path, url)
    said = rf"sending at offset 10485760: the store answers 403 .*: '{place.scheme}://"
    assert re.search(said, str(error))
    with pytest.raises(ringstow.NoCheckpointError):  # uploads in progress are invisible
        ringstow.load(url)
    report = ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert len(proxy.requests("PUT", PART_OF[place.scheme])) == 1
    assert 0 < report.sent_bytes < PARTS
    assert_same(ringstow.load(url), state)
    assert not place.has_unfinished()


def test_finished_upload_is_neither_gone_on_with_nor_aborted(saved, bucket, proxy):
    path, state = saved
    url = f"{bucket.url}/x"
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "manifest.json", times=None)
    with pytest.raises(PermissionError):
        ringstow.promote(path, url, part_bytes=PARTS)
    proxy.clear()
    ringstow.promote(path, url, part_bytes=PARTS)
    [request] = proxy.requests("PUT")
    assert request.path == f"/{bucket.name}/x/manifest.json"
    assert not proxy.requests("DELETE")
    assert_same(ringstow.load(url), state)


def test_upload_that_the_store_has_dropped_is_begun_again(saved, place, proxy):
    path, state = saved
    url = f"{place.url}/x"
    fail_at_part_3(proxy, place, path, url)
    drop_what_was_sent(place)
    ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert_same(ringstow.load(url), state)
    assert not place.has_unfinished()


def test_prune_aborts_the_uploads_of_a_checkpoint_that_is_gone(saved, bucket, proxy):
    path, _ = saved
    fail_at_part_3(proxy, bucket, path, f"{bucket.url}/x")
    assert len(bucket.uploads()) == 1
    swept = ringstow.prune(path.parent)
    assert not swept.removed
    assert "`ringstow promote" in swept.left[0].reason
    ringstow.remove(path)
    proxy.on(faults.Refuse(403, "AccessDenied"), "DELETE", times=None)
    refused = ringstow.prune(path.parent)
    assert "aborting an upload to" in refused.left[0].reason
    proxy.clear()
    assert not ringstow.prune(path.parent).left
    assert bucket.uploads() == {}
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("place", ["azurite", "google"], indirect=True)
def test_prune_forgets_the_upload_of_a_checkpoint_that_is_gone(saved, place, proxy):
    """Azure drops blocks by itself, after a week: no request does."""
    path, _ = saved
    fail_at_part_3(proxy, place, path, f"{place.url}/x")
    ringstow.remove(path)
    assert not ringstow.prune(path.parent).left
    assert os.listdir(path.parent) == []
    assert place.keys() == []
    assert place.has_unfinished() == (place.scheme == "az")


@pytest.mark.parametrize("left", ["", "step-9-0123456789abcdef/journal.part"])
def test_prune_removes_what_a_promotion_left_that_began_nothing(saved, left):
    path, _ = saved
    journals = path.parent / ".ringstow-promotions"
    journals.mkdir()
    if left:
        (journals / left).parent.mkdir()
        (journals / left).write_text("{")
    assert not ringstow.prune(path.parent).left
    assert os.listdir(path.parent) == ["step-3"]


def test_upload_that_cannot_be_aborted_keeps_no_other(bucket, proxy, tmp_path):
    path = tmp_path / "run" / "c"
    state = {name: torch.randn(12 << 17) for name in "ab"}
    ringstow.save(state, path, config=ringstow.Config(shard_bytes=6 << 20))
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "partNumber=2", times=None)
    with pytest.raises(PermissionError):
        ringstow.promote(path, f"{bucket.url}/x", part_bytes=PARTS)
    proxy.clear()
    assert len(bucket.uploads()) == 2
    ringstow.remove(path)
    proxy.on(faults.Refuse(403, "AccessDenied"), "DELETE")  # the first one
    assert len(ringstow.prune(path.parent).left) == 1
    assert len(bucket.uploads()) == 1


def test_uploads_of_a_replaced_checkpoint_are_aborted(saved, bucket, proxy):
    path, _ = saved
    url = f"{bucket.url}/x"
    fail_at_part_3(proxy, bucket, path, url)
    state = state_of(seed=2)
    ringstow.save(state, path)
    ringstow.promote(path, url, part_bytes=PARTS)
    assert bucket.uploads() == {}
    assert_same(ringstow.load(url), state)


def test_damaged_checkpoint_is_not_promoted(saved, bucket):
    path, _ = saved
    [shard] = path.glob("*.safetensors")
    flip(shard, 7_000_000)
    with pytest.raises(ringstow.CorruptCheckpointError) as caught:
        ringstow.promote(path, f"{bucket.url}/x", part_bytes=PARTS)
    assert caught.value.offset == 6 << 20
    assert caught.value.tensors == ["w"]
    assert not bucket.has("x/manifest.json")


def test_damage_in_the_store_is_found(saved, place):
    path, _ = saved
    url = f"{place.url}/x"
    ringstow.promote(path, url)
    [shard] = shards_of(place)
    place.flip(shard, 7_000_000)
    with pytest.raises(ringstow.CorruptCheckpointError, match=rf"{place.scheme}://.*w"):
        ringstow.load(url)
    report = ringstow.verify(url)
    assert [damage.offset for damage in report.damage] == [6 << 20]
    assert report.damaged_tensors == ("w",)
    place.delete(shard)
    with pytest.raises(ringstow.MissingFilesError, match="missing"):
        ringstow.load(url)


def test_answer_that_is_cut_is_read_on(saved, bucket, proxy):
    path, state = saved
    url = f"{bucket.url}/x"
    ringstow.promote(path, url)
    proxy.on(faults.CutResponse(300_000), "GET", "safetensors", times=2)
    assert_same(ringstow.load(url), state)


def test_one_tensor_reads_little_more_than_its_bytes(bucket, proxy, tmp_path):
    state = {f"t{i}": torch.randn(1 << 18) for i in range(16)}
    ringstow.save(state, tmp_path / "c")
    url = f"{bucket.url}/x"
    ringstow.promote(tmp_path / "c", url)
    proxy.clear()
    with ringstow.open(url) as checkpoint:
        assert torch.equal(checkpoint["t5"].load(), state["t5"])
    read = sum(request.down for request in proxy.requests("GET", "safetensors"))
    # A load reads whole checksum chunks, of 1 MiB. The tensor of 1 MiB begins in one, and ends in
    # the next.
    assert read <= 2.1 * (1 << 20)


KILLED = """
import sys, ringstow
path, url = sys.argv[1:]
ringstow.promote(path, url, part_bytes=5 << 20, uploads=2)
print("done")
"""


@pytest.mark.parametrize("seed", range(4))
def test_killed_promotion_goes_on_and_leaves_nothing(saved, container, proxy, monkeypatch, seed):
    """Killed at a request that a die chooses, which reaches the server before, after or never.

    This is Azure's; `test_promote_killed` has those of S3.
    """
    path, state = saved
    url = f"{container.url}/x"
    dice = random.Random(seed)
    held = proxy.on(faults.Hold(answer=dice.random() < 0.5), skip=dice.randrange(6))
    program = forked.Program(KILLED, path, url)
    held.wait()
    program.kill()
    assert program.wait().returncode == -signal.SIGKILL
    if dice.random() < 0.5:
        proxy.clear()  # the request of the dead arrives now
    for name, value in container.environment().items():
        monkeypatch.setenv(name, value)
    if not container.has("x/manifest.json"):
        with pytest.raises(ringstow.IncompleteCheckpointError):
            ringstow.load(url)
    ringstow.promote(path, url, part_bytes=PARTS)
    assert_same(ringstow.load(url), state)
    assert ringstow.verify(url).ok
    assert len(container.keys()) == 2  # the shard and the manifest
    assert not container.has_unfinished()


def test_steps_in_a_store_are_listed_retained_and_removed(place, tmp_path):
    run = f"{place.url}/run"
    for step in (1, 2, 10):
        ringstow.save(state_of_step(step), tmp_path / f"step-{step}", step=step)
        ringstow.promote(tmp_path / f"step-{step}", f"{run}/step-{step}")
    assert steps_in(run) == [1, 2, 10]
    assert ringstow.latest(run).path == f"{run}/step-10"
    assert ringstow.latest(f"{place.url}/nothing") is None
    ringstow.retain(run, keep=1)
    assert steps_in(run) == [10]
    assert place.keys("run/step-10/") == place.keys() != []
    ringstow.remove(f"{run}/step-10")
    assert place.keys() == []


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_program_promotes_lists_and_verifies(saved, bucket, arguments):
    path, _ = saved
    url = f"{bucket.url}/run/step-3"

    def ran(*words):
        return forked.ringstow(*words, check=True).stdout

    assert url in ran("promote", path, "--to", url, *arguments)
    assert "step-3" in ran("ls", f"{bucket.url}/run", *arguments)
    assert "w" in ran("show", url, *arguments)
    ran("verify", url, *arguments)
    ran("diff", path, url, *arguments)


def test_wrong_urls_say_what_to_write(saved):
    path, _ = saved
    with pytest.raises(ringstow.InvalidStateError, match="one is in the other"):
        ringstow.promote(path, path / "copy")
    with pytest.raises(ringstow.InvalidStateError, match="URL"):
        ringstow.save({}, "s3://bucket/x")
    with pytest.raises(ringstow.InvalidStateError, match="by the environment") as caught:
        ringstow.promote(path, "s3://user:secret@bucket/x")
    assert "secret" not in str(caught.value)


def test_wrong_key_and_wrong_container_of_azure_say_so(saved, container, monkeypatch):
    path, _ = saved
    with pytest.raises(FileNotFoundError, match="404 .*ContainerNotFound"):
        ringstow.promote(path, "az://nowhere/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(PermissionError, match="403 .*AuthorizationFailure"):
        ringstow.promote(path, f"{container.url}/x")


def test_wrong_bucket_of_google_and_missing_tls_say_so(saved, google_bucket, monkeypatch):
    path, _ = saved
    with pytest.raises(FileNotFoundError, match="404 .*NoSuchBucket"):
        ringstow.promote(path, "gs://nowhere/x")
    monkeypatch.delenv("GOOGLE_ALLOW_HTTP")
    with pytest.raises(OSError, match="GOOGLE_ALLOW_HTTP"):
        ringstow.promote(path, f"{google_bucket.url}/x")


def test_part_of_a_wrong_size_is_refused(saved):
    path, _ = saved
    with pytest.raises(ringstow.InvalidStateError, match="part_bytes"):
        ringstow.promote(path, "s3://bucket/x", part_bytes=1000)


LOADED = """
import sys, ringstow.distributed, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
into = {"w": torch.zeros(12 << 18)}
ringstow.distributed.load_into(into, sys.argv[1], strict=False)
print(float(into["w"][5]))
dist.destroy_process_group()
"""


def test_ranks_load_by_url(saved, bucket):
    path, state = saved
    url = f"{bucket.url}/x"
    ringstow.promote(path, url)
    done = forked.python(LOADED, url, check=True)
    assert float(done.stdout) == float(state["w"][5])


def test_parts_of_another_size_are_not_mixed(tmp_path, bucket, proxy):
    """The size is changed between two attempts such that the number of parts stays the same."""
    state, path, url = state_of(18), tmp_path / "c", f"{bucket.url}/x"
    ringstow.save(state, path)
    proxy.on(faults.Refuse(403, "AccessDenied"), "PUT", "partNumber=2", times=None)
    with pytest.raises(PermissionError):
        ringstow.promote(path, url, part_bytes=14 << 20, uploads=1)
    proxy.clear()
    ringstow.promote(path, url, part_bytes=10 << 20, uploads=1)
    assert_same(ringstow.load(url), state)
    assert bucket.uploads() == {}


def test_shard_that_vanished_is_sent_again(saved, bucket):
    path, state = saved
    url = f"{bucket.url}/x"
    ringstow.promote(path, url)
    [shard] = shards_of(bucket)
    bucket.delete(shard)
    assert not ringstow.promote(path, url).was_there
    assert_same(ringstow.load(url), state)


def test_ctrl_c_ends_a_promotion_to_a_silent_store(saved, bucket, proxy):
    path, _ = saved
    held = proxy.on(faults.Hold(), "PUT")
    program = forked.Program(INTERRUPTED, path, f"{bucket.url}/x")
    held.wait()
    program.send_signal(signal.SIGINT)
    assert "interrupted" in program.wait().stdout


INTERRUPTED = """
import sys, ringstow
try:
    ringstow.promote(*sys.argv[1:])
except KeyboardInterrupt:
    print("interrupted")
"""
