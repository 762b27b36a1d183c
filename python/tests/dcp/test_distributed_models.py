"""Models of other programs load into sharded tensors: each rank reads its slices alone."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ringstow import distributed

ROWS, COLUMNS = 1024, 2048


def weights():
    torch.manual_seed(3)
    return {
        "model.embed.weight": torch.randn(ROWS, COLUMNS),
        "model.down.weight": torch.randn(ROWS, COLUMNS).bfloat16(),
        "model.norm.weight": torch.randn(7),
    }


def hugging_face(at):
    """A model in two files with an index."""
    at.mkdir(exist_ok=True)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    state = weights()
    listed = {name: names[name.endswith("norm.weight")] for name in state}
    for file in names:
        save_file({n: one for n, one in state.items() if listed[n] == file}, at / file)
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return at


def in_one_file(at):
    save_file(weights(), at / "model.safetensors")
    return at / "model.safetensors"


def of_a_trainer(at):
    hugging_face(at / "checkpoint-5")
    (at / "checkpoint-5/trainer_state.json").write_text("{}")
    return at / "checkpoint-5"


def load(rank, path, prefix):
    mesh = init_device_mesh("cpu", (2,))
    expected = weights()
    dims = {"model.embed.weight": 0, "model.down.weight": 1}
    state = {
        name: distribute_tensor(torch.zeros_like(one), mesh, [Shard(dims[name])])
        if name in dims
        else torch.zeros_like(one)
        for name, one in expected.items()
    }
    report = distributed.load_into(state, path, prefix=prefix)
    for name, one in state.items():
        found = one.full_tensor() if name in dims else one
        assert torch.equal(found, expected[name]), name
    return report.read_bytes


@pytest.mark.parametrize("write", [hugging_face, in_one_file, of_a_trainer])
def test_each_rank_reads_its_slices_of_a_model(ranks, tmp_path, write):
    path = write(tmp_path)
    read = ranks(2).run(load, path, "model" if write is of_a_trainer else None)
    # Columns are read with the gaps between them; rows are half of the rows.
    rows, columns = 4 * ROWS * COLUMNS, 2 * ROWS * COLUMNS
    assert max(read) < 0.6 * rows + columns


@on_ranks(2)
def test_model_without_one_of_its_files_is_every_ranks_error(rank, tmp_path):
    if rank == 0:
        (hugging_face(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    dist.barrier()
    state = {"model.embed.weight": torch.zeros(ROWS, COLUMNS)}
    kind, text = raised(lambda: distributed.load_into(state, tmp_path, strict=False))
    assert kind == "MissingFilesError"
    assert "model-00002-of-00002.safetensors" in text
