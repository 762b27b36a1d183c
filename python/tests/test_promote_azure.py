"""Checkpoints in Azure, on azurite, with a proxy in front of it that misbehaves."""

import os
import random
import signal

import forked
import pytest
from stores import faults
from test_promote import KILLED, PARTS, assert_same, state_of
from tiered import state_of as state_of_step

import ringstow


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint's path and its state: one shard of three parts."""
    state, path = state_of(), tmp_path / "run" / "step-3"
    ringstow.save(state, path, step=3)
    return path, state


def fail_at_block_3(proxy, path, url):
    """Send two blocks of three, one after the other."""
    proxy.on(faults.Refuse(403, "AuthorizationFailure"), "PUT", "comp=block", skip=2, times=None)
    with pytest.raises(PermissionError, match="the store answers 403 .*AuthorizationFailure"):
        ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    proxy.clear()


def test_loser_of_a_race_gets_no_manifest(saved, container, proxy, tmp_path):
    """The other checkpoint appears after the promotion has looked for one, before its commit."""
    path, _ = saved
    other, winner = tmp_path / "other", state_of(seed=1)
    ringstow.save(winner, other)
    held = proxy.on(faults.Hold(), "PUT", "manifest.json")
    program = forked.Program(LOSING, path, f"{container.url}/x")
    held.wait()
    ringstow.promote(other, f"{container.url}/x")
    held.release()
    assert "another checkpoint is there" in program.wait().stdout
    assert_same(ringstow.load(f"{container.url}/x"), winner)


LOSING = """
import sys, ringstow
try:
    ringstow.promote(*sys.argv[1:])
except FileExistsError as error:
    print(error)
"""


def test_answer_of_the_commit_that_is_lost_is_no_failure(saved, container, proxy):
    path, state = saved
    proxy.on(faults.LoseAnswer(), "PUT", "manifest.json")
    ringstow.promote(path, f"{container.url}/x")
    assert_same(ringstow.load(f"{container.url}/x"), state)


@pytest.mark.parametrize(
    ("fault", "method", "target"),
    [
        (faults.SlowDown(503, "ServerBusy"), "PUT", "comp=block&"),
        (faults.CutRequest(100_000), "PUT", "comp=block&"),
        (faults.LoseAnswer(), "PUT", "comp=blocklist"),
    ],
    ids=["busy", "cut", "lost"],
)
def test_passing_trouble_is_overcome(saved, container, proxy, fault, method, target):
    path, state = saved
    proxy.on(fault, method, target)
    ringstow.promote(path, f"{container.url}/x", part_bytes=PARTS)
    assert_same(ringstow.load(f"{container.url}/x"), state)


def test_promotion_goes_on_where_it_failed(saved, container, proxy):
    path, state = saved
    url = f"{container.url}/x"
    fail_at_block_3(proxy, path, url)
    with pytest.raises(ringstow.NoCheckpointError):  # what was sent so far is invisible
        ringstow.load(url)
    report = ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert len(proxy.requests("PUT", "comp=block&")) == 1
    assert 0 < report.sent_bytes < PARTS
    assert_same(ringstow.load(url), state)
    assert container.begun() == []


def test_blocks_that_the_store_has_dropped_are_sent_again(saved, container, proxy):
    path, state = saved
    url = f"{container.url}/x"
    fail_at_block_3(proxy, path, url)
    [begun] = container.begun()
    assert container.blocks(begun) == 2
    container.put(begun, b"")
    container.delete(begun)
    ringstow.promote(path, url, part_bytes=PARTS, uploads=1)
    assert_same(ringstow.load(url), state)


def test_prune_forgets_the_upload_of_a_checkpoint_that_is_gone(saved, container, proxy):
    """Azure drops blocks by itself, after a week: no request does."""
    path, _ = saved
    fail_at_block_3(proxy, path, f"{container.url}/x")
    ringstow.remove(path)
    assert not ringstow.prune(path.parent).left
    assert os.listdir(path.parent) == []
    assert container.keys() == []


@pytest.mark.parametrize("seed", range(4))
def test_killed_promotion_goes_on_and_leaves_nothing(saved, container, proxy, monkeypatch, seed):
    """Killed at a request that a die chooses, which reaches the server before, after or never."""
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
    assert container.begun() == []
    assert len(container.keys()) == 2  # the shard and the manifest


def test_steps_are_retained_and_removed(tmp_path, container):
    for step in (1, 2, 3):
        ringstow.save(state_of_step(step), tmp_path / f"step-{step}", step=step)
        ringstow.promote(tmp_path / f"step-{step}", f"{container.url}/run/step-{step}")
    ringstow.retain(f"{container.url}/run", keep=1)
    assert [found.step for found in ringstow.steps(f"{container.url}/run")] == [3]
    assert container.keys("run/step-3/") == container.keys() != []
    ringstow.remove(f"{container.url}/run/step-3")
    assert container.keys() == []


def test_wrong_key_and_wrong_container_say_so(saved, container, monkeypatch):
    path, _ = saved
    with pytest.raises(FileNotFoundError, match="404 .*ContainerNotFound"):
        ringstow.promote(path, "az://nowhere/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(PermissionError, match="403 .*AuthorizationFailure"):
        ringstow.promote(path, f"{container.url}/x")
