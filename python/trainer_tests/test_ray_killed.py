"""Workers, and whole runs, of Ray Train that are killed while they save resume to the bit."""

from __future__ import annotations

import os
import subprocess
import sys

import children
import pytest
import ray_runs as runs
from support import assert_same

import ringstow
from ringstow.dcp._private import flattened

pytest.importorskip("ray.train", reason="needs the extra ray: make test-trainers installs it")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster():
    ray = runs.start_cluster()
    yield ray
    ray.shutdown()


def by_name(state):
    return dict(sorted(state.items()))


def assert_complete(root, steps):
    """Only complete checkpoints are in the run's directory, and these."""
    found = runs.checkpoints(root)
    assert all(ringstow.verify(path).ok for path in found)
    assert [ringstow.open(path).info.step for path in found] == steps


@pytest.mark.long  # CI has the kill of workers with shards
@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_worker_resumes_from_the_last_checkpoint_that_ray_counts(kills, cluster, tmp_path):
    moments = [("writing", 2, 0), ("committed", 3, 0), ("full", 3, 0)][:kills]
    result = runs.fit(runs.train, tmp_path, failures=kills, keep=2, moments=moments)
    assert runs.seen(tmp_path) == ["0", "2", "3", "3"][: kills + 1]
    assert_same(ringstow.load(result.checkpoint.path), runs.unbroken())
    # If a worker is killed once it has committed, Ray, which keeps two, does not know of the first.
    assert_complete(tmp_path, [4, 5] if kills == 1 else [3, 4, 5])
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [4, 5]


@pytest.mark.parametrize("kills", [1, 2])
def test_workers_with_shards_resume_if_any_of_them_is_killed(kills, cluster, tmp_path):
    moments = [("shard", 1, 1), ("committing", 2, 0)][:kills]
    options = {"workers": 2, "sharded": True, "keep": 2, "moments": moments}
    result = runs.fit(runs.train, tmp_path, failures=kills, **options)
    assert runs.seen(tmp_path) == ["0", "1", "2"][: kills + 1]
    found = by_name(flattened(ringstow.load(result.checkpoint.path))[0])
    whole, _ = children.results(2, runs.unbroken_shards)
    assert_same(found, by_name(whole))
    assert_complete(tmp_path, [4, 5])


@pytest.mark.long
def test_a_killed_driver_leaves_a_run_to_resume(cluster, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    address = cluster.get_runtime_context().gcs_address
    command = [sys.executable, runs.__file__, address, str(tmp_path)]
    driver = subprocess.Popen(command)
    with open(tmp_path / "pipe", "rb") as pipe:
        assert pipe.read(6) == b"saving"
        driver.kill()
        driver.wait()
        assert pipe.read() == b""  # the worker has ended
    result = runs.fit(runs.train, tmp_path)
    assert runs.seen(tmp_path) == ["0", "2"]
    assert_same(ringstow.load(result.checkpoint.path), runs.unbroken())
    assert_complete(tmp_path, list(range(runs.EPOCHS)))
