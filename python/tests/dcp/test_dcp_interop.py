"""Exchange with torch's Hugging Face classes, in both directions, and with plain directories."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringstow.dcp

pytestmark = pytest.mark.torch_seam

hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")

DTYPES = ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"]
DTYPES += ["int64", "uint8"]


def fulls():
    """Return full tensors of every kind that the safetensors format supports."""
    numbers = torch.arange(10 * 6, dtype=torch.float32).reshape(10, 6)
    tensors = {f"d.{name}": (numbers + 1).to(getattr(torch, name)) for name in DTYPES}
    tensors["rows"], tensors["columns"] = numbers, -numbers
    tensors["uneven"], tensors["short"] = numbers[:7] * 3, torch.ones(1, 5)
    tensors["replicated"], tensors["scalar"] = numbers[0], torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    return {name: tensor.clone() for name, tensor in tensors.items()}


PLACEMENTS = {"columns": Shard(1), "replicated": Replicate(), "scalar": Replicate()}


def sharded(tensors):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {  # each rank cuts its own part: gloo can't scatter every dtype
        name: distribute_tensor(tensor, mesh, [PLACEMENTS.get(name, Shard(0))], src_data_rank=None)
        for name, tensor in tensors.items()
    }


def blank(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_holds(state):
    """Assert that this rank's part of the state equals its part of the saved tensors."""
    expected = sharded(fulls()) if isinstance(state["rows"], DTensor) else fulls()
    for name, tensor in expected.items():
        ours, theirs = (
            t.to_local() if isinstance(t, DTensor) else t for t in (tensor, state[name])
        )
        assert torch.equal(bits(ours), bits(theirs)), name


def save_ours(rank, path):
    state = sharded(fulls()) | {"step": 7, "complex": torch.ones(3, dtype=torch.complex128)}
    dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(path))


def load_theirs(rank, path):
    state = sharded(blank(fulls()))
    dcp.load(state, storage_reader=hf.HuggingFaceStorageReader(str(path)))
    assert_holds(state)


def save_theirs(rank, path, distributed):
    state = sharded(fulls()) if distributed else fulls()
    del state["empty"]  # torch's writer fails on empty tensors
    writer = hf.HuggingFaceStorageWriter(str(path), save_distributed=distributed)
    dcp.save(state, storage_writer=writer)


def load_ours(rank, path):
    state = sharded(blank(fulls()))
    del state["empty"]
    dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path))
    assert_holds(state | sharded({"empty": torch.empty(0, 3)}))


@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_torchs_hugging_face_reader_loads_ours(ranks, tmp_path, savers, loaders):
    ranks(savers).run(save_ours, tmp_path)
    ranks(loaders).run(load_theirs, tmp_path)


def test_unstorable_names_are_stored_under_reserved_ones(ranks, tmp_path):
    ranks(2).run(save_ours, tmp_path)
    names = hf.HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata
    assert set(names) - set(fulls()) == {"__ringstow__.step", "__ringstow__.complex"}


@pytest.mark.parametrize(
    ("savers", "loaders", "distributed"),
    [(1, 2, True), (2, 1, True), (2, 4, True), (4, 2, True), (1, 2, False)],
)
def test_loads_files_of_torchs_writer(ranks, tmp_path, savers, loaders, distributed):
    ranks(savers).run(save_theirs, tmp_path, distributed)
    ranks(loaders).run(load_ours, tmp_path)


def write_plain(path, *, index):
    """Write a directory as Hugging Face's libraries do."""
    tensors = fulls()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2]}
    files["model-00002-of-00002.safetensors"] = names[1::2]
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, path / file, {"format": "pt"})
    if index:
        weight_map = {name: file for file, members in files.items() for name in members}
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("index", [True, False])
def test_a_plain_directory_loads_onto_any_number_of_ranks(ranks, tmp_path, index):
    """The files are links, as in the hub's cache."""
    path = tmp_path / "snapshot"
    (tmp_path / "blobs").mkdir()
    path.mkdir()
    write_plain(tmp_path / "blobs", index=index)
    for file in (tmp_path / "blobs").iterdir():
        (path / file.name).symlink_to(f"../blobs/{file.name}")
    ranks(2).run(load_ours, path)
    state = blank(fulls())
    reader = ringstow.dcp.StorageReader(path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_holds(state)
    assert not reader.report.verified


def test_a_missing_file_is_an_error_and_not_a_hole(ranks, tmp_path, caplog):
    ranks(4).run(save_theirs, tmp_path, True)
    next(tmp_path.glob("*00003*.safetensors")).unlink()
    state = blank(fulls())
    with pytest.raises(CheckpointException):
        dcp.load(state, storage_reader=ringstow.dcp.StorageReader(tmp_path), no_dist=True)
    assert "among what is missing" in caplog.text  # torch 2.11 only says that it failed


def test_save_writes_the_mark_of_a_valid_step(ranks, tmp_path):
    ranks(2).run(save_ours, tmp_path)
    assert (tmp_path / ".metadata").is_file()
    mark, manifest = (tmp_path / name for name in (".metadata", "manifest.json"))
    assert mark.stat().st_mtime_ns >= manifest.stat().st_mtime_ns
