"""Programs that name torch's HuggingFaceStorageWriter write a consolidated model by all ranks."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors import safe_open
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow.dcp import _drop_in_hf, _private

pytestmark = [
    pytest.mark.skipif(not _drop_in_hf.IS_KNOWN, reason="an older torch's writer"),
    pytest.mark.torch_seam,
]

FULL = {f"w{n}": torch.arange(60.0).view(6, 10) + n for n in range(4)}
INDEX = "model.safetensors.index.json"


def state():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(n % 2)], src_data_rank=None)
        for n, (name, tensor) in enumerate(FULL.items())
    }


def save(rank, path, options, background=False, **saving):
    with ringstow.dcp.use_by_default():
        writer = dcp.HuggingFaceStorageWriter(path=str(path), **options)
        if background:
            dcp.async_save(state(), storage_writer=writer, **saving).result()
        else:
            dcp.save(state(), storage_writer=writer, **saving)
        return type(writer).__module__


def found(path):
    tensors = {}
    for name in os.listdir(path):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), "pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def assert_whole(path):
    tensors = found(path)
    assert tensors.keys() == FULL.keys()
    assert all(torch.equal(tensors[name], FULL[name]) for name in FULL)


CONSOLIDATED = {"save_distributed": True, "enable_consolidation": True}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("options", [CONSOLIDATED, {}], ids=["consolidated", "default"])
def test_model_has_torchs_names_and_no_shards_beside_it(ranks, tmp_path, options, background):
    path = tmp_path / "m"
    for module in ranks(2).run(save, path, options, background):
        assert module.startswith("ringstow.")
    assert sorted(os.listdir(path)) == ["model-00001-of-00001.safetensors", INDEX]
    assert_whole(path)
    index = json.loads((path / INDEX).read_text())
    assert index["weight_map"] == dict.fromkeys(FULL, "model-00001-of-00001.safetensors")


def test_mapping_decides_the_files(ranks, tmp_path):
    mapping = {"w0": 3, "w1": 1, "w2": 3, "w3": 1}
    ranks(2).run(save, tmp_path / "m", CONSOLIDATED | {"fqn_to_index_mapping": mapping})
    assert_whole(tmp_path / "m")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["weight_map"] == {
        name: f"model-{number:05}-of-00003.safetensors" for name, number in mapping.items()
    }


def test_files_are_those_that_torch_consolidates(ranks, tmp_path):
    mapping = {"w0": 1, "w1": 2, "w2": 1, "w3": 2}
    options = CONSOLIDATED | {"fqn_to_index_mapping": mapping}
    ranks(2).run(save, tmp_path / "ours", options)
    ranks(2).run(save_theirs, tmp_path / "theirs", options)
    ours, theirs = (tmp_path / kind for kind in ("ours", "theirs"))
    names = [{name for name in os.listdir(path) if "model" in name} for path in (ours, theirs)]
    assert names[0] == names[1]
    assert_whole(theirs)
    maps = [json.loads((path / INDEX).read_text())["weight_map"] for path in (ours, theirs)]
    assert maps[0] == maps[1]


def save_theirs(rank, path, options):
    writer = hf_storage.HuggingFaceStorageWriter(path=str(path), **options)
    dcp.save(state(), storage_writer=writer)


def load_back(rank, path):
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    dcp.load(target, storage_reader=hf_storage.HuggingFaceStorageReader(str(path)))
    return {name: tensor.full_tensor() for name, tensor in target.items()}


def test_torchs_reader_loads_it(ranks, tmp_path):
    ranks(2).run(save, tmp_path / "m", CONSOLIDATED)
    for loaded in ranks(2).run(load_back, tmp_path / "m"):
        assert all(torch.equal(loaded[name], FULL[name]) for name in FULL)


@on_ranks(2)
def test_later_save_replaces_the_model(rank, tmp_path):
    with ringstow.dcp.use_by_default():
        writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "m"))
        dcp.save(state(), storage_writer=writer)
        dcp.save({"only": torch.ones(3)}, storage_writer=writer)
        assert writer.report.tensors == 1
    dist.barrier()
    assert found(tmp_path / "m").keys() == {"only"}


@on_ranks(4)
def test_group_of_some_ranks_saves(rank, tmp_path):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        with ringstow.dcp.use_by_default():
            writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "m"))
            dcp.save({f"w{rank}": torch.ones(3)}, storage_writer=writer, process_group=group)
    dist.barrier()
    assert found(tmp_path / "m").keys() == {"w1", "w3"}


@on_ranks(2)
def test_process_without_dist_saves_by_itself(rank, tmp_path):
    path = f"{tmp_path}/{rank}"
    with ringstow.dcp.use_by_default():
        writer = dcp.HuggingFaceStorageWriter(path=path)
        dcp.save({"w": torch.full((2,), rank)}, storage_writer=writer, no_dist=True)
    assert found(path)["w"].tolist() == [rank, rank]


@on_ranks(2)
def test_other_checkpoint_at_the_path_stays(rank, tmp_path):
    if rank == 0:
        ringstow.save({"w": torch.ones(2)}, tmp_path / "m")
    dist.barrier()
    with pytest.raises(CheckpointException) as caught:
        save(rank, tmp_path / "m", CONSOLIDATED)
    errors = [str(error) for error, _ in caught.value.failures.values()]
    assert len(errors) == 2
    assert all("manifest.json" in error for error in errors)
    assert ringstow.load(tmp_path / "m").keys() == {"w"}


def test_shards_of_each_rank_are_torchs_own(tmp_path, caplog):
    _drop_in_hf._warned.clear()
    with ringstow.dcp.use_by_default():
        writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
        assert isinstance(writer, dcp.HuggingFaceStorageWriter)
    assert type(writer) is hf_storage.HuggingFaceStorageWriter
    assert "With enable_consolidation=True" in caplog.text
    assert dcp.HuggingFaceStorageWriter is hf_storage.HuggingFaceStorageWriter


def test_arguments_without_effect_are_named_once(tmp_path, caplog):
    _drop_in_hf._warned.clear()
    for _ in range(2):
        _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path), thread_count=4)
    assert caplog.text.count("thread_count=4") == 1
    with pytest.raises(TypeError):
        _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path), no_such_argument=1)
    with pytest.raises(ringstow.InvalidStateError, match="not a path in the file system"):
        _drop_in_hf.HuggingFaceStorageWriter("hf://datasets/x")


def test_argument_of_another_torch_is_refused_unless_it_is_the_default(tmp_path, monkeypatch):
    import inspect

    parameter = inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None)
    known = [*_drop_in_hf._SIGNATURE.parameters.values(), parameter]
    monkeypatch.setattr(_drop_in_hf, "_SIGNATURE", _drop_in_hf._SIGNATURE.replace(parameters=known))
    _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path), token=None)
    with pytest.raises(ringstow.UnsupportedError, match="token='secret'"):
        _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path), token="secret")


def test_ranks_without_collectives_are_refused(tmp_path):
    writer = _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path))
    with pytest.raises(ringstow.UnsupportedError, match="collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def test_torch_that_hides_its_group_is_refused(tmp_path, monkeypatch):
    """Regression guard: the private frame of ``dcp.save`` has another name."""
    monkeypatch.setattr(_private, "save_meeting", lambda: None)
    writer = _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path / "m"))
    with pytest.raises(CheckpointException, match="export_hf"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    assert not (tmp_path / "m").exists()


def test_writer_pickles(tmp_path):
    writer = _drop_in_hf.HuggingFaceStorageWriter(str(tmp_path), {"w": 1})
    twin = pickle.loads(pickle.dumps(writer))
    assert (twin.path, twin._numbers) == (tmp_path, (("w", 1),))
