"""Ray Train's workers save and resume by ringstow, and refuse together what cannot be saved."""

from __future__ import annotations

import enum
import inspect
import types

import pytest
import ray_runs as runs
import torch
from all_trainers import run_page

import ringstow

pytest.importorskip("ray.train", reason="needs the extra ray: make test-trainers installs it")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster():
    ray = runs.start_cluster()
    yield ray
    ray.shutdown()


@pytest.mark.long  # CI has the other run of workers
def test_the_pages_example_trains_and_ray_keeps_two_checkpoints(cluster, tmp_path):
    names = run_page("ray.md", edit=lambda code: code.replace("/mnt/shared", str(tmp_path)))
    kept = [checkpoint.path for checkpoint, _ in names["result"].best_checkpoints]
    assert sorted(map(str, runs.checkpoints(tmp_path))) == sorted(kept)
    assert [ringstow.load(path)["epoch"] for path in kept] == [2, 3]
    assert ringstow.latest(tmp_path / "run").path == names["result"].checkpoint.path
    with ringstow.open(kept[1]) as checkpoint:
        assert set(checkpoint.info.metrics) == {"loss"}


def test_workers_agree_on_what_is_saved_and_restored(cluster, tmp_path):
    import ray.train

    # A full disk ends the first attempt, and a value that cannot be saved the second.
    with pytest.raises(ray.train.TrainingFailedError, match="allow_pickle=True"):
        runs.fit(runs.agree, tmp_path, workers=2, failures=1)
    for rank in range(2):
        assert (tmp_path / f"noted-{rank}").read_text().splitlines() == runs.AGREED
    assert all(ringstow.verify(path).ok for path in runs.checkpoints(tmp_path))


# Without a cluster.


@pytest.fixture
def ringstow_ray():
    import ringstow.integrations.ray

    return ringstow.integrations.ray


def storage(monkeypatch, path, filesystem=None):
    """Let Ray's context have a storage, as in a worker."""
    import ray.train
    from ray.train.v2._internal.execution.storage import StorageContext

    one = StorageContext(str(path), "run", storage_filesystem=filesystem)
    context = types.SimpleNamespace(get_storage=lambda: one)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)


def test_storage_that_is_not_local_is_refused_with_a_remedy(ringstow_ray, monkeypatch, tmp_path):
    import pyarrow.fs
    from fsspec.implementations.local import LocalFileSystem

    for filesystem in (
        pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(LocalFileSystem())),
        pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem()),
    ):
        storage(monkeypatch, tmp_path, filesystem)
        for call in (ringstow_ray.restore, lambda: ringstow_ray.report({}, {})):
            with pytest.raises(ringstow.UnsupportedError, match="mount it"):
                call()


def test_a_node_that_does_not_see_the_storage_is_refused(ringstow_ray, monkeypatch, tmp_path):
    storage(monkeypatch, tmp_path)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(ringstow.InvalidStateError, match="all nodes share"):
        ringstow_ray.restore()


def test_local_mode_is_refused(ringstow_ray, monkeypatch):
    import ray.train
    from ray.train.v2.api.context import LocalTrainContext

    monkeypatch.setattr(ray.train, "get_context", lambda: LocalTrainContext("run"))
    with pytest.raises(ringstow.UnsupportedError, match="num_workers=1"):
        ringstow_ray.restore()


def test_workers_without_a_process_group_are_refused(ringstow_ray, monkeypatch, tmp_path):
    storage(monkeypatch, tmp_path)
    with pytest.raises(ringstow.UnsupportedError, match="TorchTrainer"):
        ringstow_ray.report({}, {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staging": "all"}, "staging"),
        ({"config": ringstow.Config(stripe=["elsewhere"])}, "stripe"),
        ({"config": ringstow.Config(tiers=["elsewhere"])}, "tiers"),
    ],
)
def test_options_that_ray_cannot_have_are_refused_before_anything_is_reported(
    options, said, ringstow_ray
):
    with pytest.raises(ringstow.InvalidStateError, match=said):
        ringstow_ray.report({}, {}, **options)


def test_rays_seam_is_as_this_module_knows_it(ringstow_ray):
    import ray.train
    from ray.train.v2._internal.execution.context import TrainContext
    from ray.train.v2._internal.execution.storage import StorageContext

    taken = ringstow_ray._SEAM.calls[ray.train]["report"].split()
    assert list(inspect.signature(ray.train.report).parameters) == taken
    # The upload function runs in a thread, and only its return lets Ray count the checkpoint.
    source = inspect.getsource(TrainContext.report)
    assert source.index("self._upload_checkpoint") < source.index("self._wait_then_report")
    assert {"experiment_fs_path"} <= set(dir(StorageContext))
    assert "except Exception as e" in source  # so a failure must be an Exception


class Loss(enum.Enum):
    MSE = "mse"


def test_values_that_refer_back_to_their_class_need_no_second_worker(ringstow_ray):
    assert ringstow_ray._plan({"loss": Loss.MSE, "w": torch.ones(1)}).leaves == {"loss", "w"}


def test_a_list_in_itself_is_named_before_anything_is_reported(ringstow_ray):
    one = []
    one.append(one)
    with pytest.raises(ringstow.InvalidStateError, match=r"^v\[0\] contains itself"):
        ringstow_ray._plan({"v": one})
