"""examples/read_by_hand.py, which knows docs/format.md alone, reads what ringstow has saved."""

import math
import subprocess
import sys

import numpy as np
import pytest
import read_by_hand
import torch
from support import ROOT, flip

import ringstow


def test_every_tensor_and_value_is_read(tmp_path):
    torch.manual_seed(0)
    state = {
        "w": torch.randn(300, 70, 5),
        "b": torch.randn(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "mask": np.array([True, False, True]),
        "step": 12,
        "lr": [0.1, {"name": "Adam"}],
    }
    ringstow.save(state, tmp_path / "c", config=ringstow.Config(shard_bytes=100_000, files=2))
    tensors, tree = read_by_hand.read(tmp_path / "c")
    assert set(tensors) == {"w", "b", "scalar", "empty", "mask"}
    assert tensors["w"] == ("F32", [300, 70, 5], state["w"].numpy().tobytes())
    assert tensors["b"].data == state["b"].view(torch.uint8).numpy().tobytes()
    assert tensors["scalar"] == ("I64", [], (3).to_bytes(8, sys.byteorder))
    assert tensors["empty"].data == b""
    assert tensors["mask"] == ("BOOL", [3], b"\1\0\1")
    assert (tree["step"], tree["lr"], tree["w"]) == (12, [0.1, {"name": "Adam"}], {"$tensor": "w"})


def save_shards(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from ringstow import distributed

    mesh = init_device_mesh("cpu", (2,))
    made = torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3)
    distributed.save(
        {str(dim): distribute_tensor(made, mesh, [Shard(dim)]) for dim in range(3)}, path
    )


def test_boxes_of_ranks_are_put_together(tmp_path):
    from dcp.ranks import Ranks

    two = Ranks(2)
    try:
        two.run(save_shards, tmp_path / "c")
    finally:
        two.stop()
    tensors, _ = read_by_hand.read(tmp_path / "c")
    made = torch.arange(5 * 7 * 3, dtype=torch.float32).numpy().tobytes()
    assert tensors == {str(dim): ("F32", [5, 7, 3], made) for dim in range(3)}


def test_damage_is_found(tmp_path):
    ringstow.save({"w": np.ones(1000)}, tmp_path / "c")
    flip(next((tmp_path / "c").glob("*.safetensors")), -1)
    with pytest.raises(ValueError, match="is damaged"):
        read_by_hand.read(tmp_path / "c")


def test_it_needs_nothing_but_python(tmp_path):
    ringstow.save({"w": np.full(3, math.pi)}, tmp_path / "c")
    program = ROOT / "examples" / "read_by_hand.py"
    command = [sys.executable, "-I", "-S", str(program), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("w F64 [3] 24 bytes\n")
