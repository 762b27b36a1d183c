"""ringstow never touches foreign files in a checkpoint's directory."""

import pytest
import torch

import ringstow

OTHERS = {"notes.txt": b"mine", "config.json": b"{}", "rank0.log": b"", "plots/loss.png": b"png"}


def put(directory):
    for name, data in OTHERS.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def found(directory):
    return {name: (directory / name).read_bytes() for name in OTHERS}


def test_saves_and_removals_leave_files_of_others_alone(tmp_path):
    path = tmp_path / "run" / "step-1"
    put(path)
    for value in (1.0, 2.0):
        ringstow.save({"w": torch.full((3,), value)}, path)
        assert found(path) == OTHERS
    assert ringstow.load(path)["w"].tolist() == [2, 2, 2]
    assert ringstow.verify(path).ok
    ringstow.prune(tmp_path / "run")
    assert found(path) == OTHERS
    ringstow.remove(path)
    assert found(path) == OTHERS
    assert sorted(p.name for p in path.iterdir()) == sorted({n.split("/")[0] for n in OTHERS})


def test_foreign_safetensors_file_refuses_the_save(tmp_path):
    put(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a shard")
    with pytest.raises(ringstow.InvalidStateError, match=r"model\.safetensors, which ringstow did"):
        ringstow.save({"w": torch.ones(3)}, tmp_path)
    assert found(tmp_path) == OTHERS
    assert not (tmp_path / "manifest.json").exists()
