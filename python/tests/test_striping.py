"""Checkpoints with parallel files, and striped over several directories, from Python."""

import os
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import assert_same

import ringstow
import ringstow.dcp
from ringstow.convert import convert


@pytest.fixture
def disks(tmp_path):
    """Two directories to stripe over."""
    made = [tmp_path / "disk1", tmp_path / "disk2"]
    for disk in made:
        disk.mkdir()
    return made


def state(seed=0):
    torch.manual_seed(seed)
    return {"step": seed, "w": {f"{n}": torch.randn(100 + n, 30) for n in range(9)}}


def test_striped_checkpoint_loads_in_every_way(tmp_path, disks):
    config = ringstow.Config(stripe=disks, files=2)
    path = tmp_path / "run" / "step-1"
    report = ringstow.save(state(), path, config=config)
    assert report.files == 6
    assert any("several stripes" in fallback.got for fallback in report.fallbacks)
    for disk in disks:
        names = sorted(os.listdir(disk / "step-1"))
        assert names[0] == "companion.json"
        assert len(names) == 3
    assert_same(ringstow.load(path, config=config), state())
    part = ringstow.load(path, keys=["w.3", "w.8"], config=config)
    assert torch.equal(part["w"]["3"], state()["w"]["3"])
    into = state(1)
    assert ringstow.load_into(into, path, config=config).tensors == 9
    assert_same(into, state())
    assert ringstow.verify(path, config=config).ok
    assert ringstow.latest(tmp_path / "run", config=config).path == str(path)


def test_a_load_without_the_stripes_names_them(tmp_path, disks, monkeypatch):
    path = tmp_path / "step-1"
    ringstow.save(state(), path, config=ringstow.Config(stripe=disks))
    with pytest.raises(ringstow.IncompleteCheckpointError, match=r"disk1.*disk2.*RINGSTOW_STRIPE"):
        ringstow.load(path)
    with pytest.raises(ringstow.MissingFilesError, match="RINGSTOW_STRIPE"):
        ringstow.latest(tmp_path)
    monkeypatch.setenv("RINGSTOW_STRIPE", ":".join(map(str, disks)))
    assert_same(ringstow.load(path), state())
    assert ringstow.latest(tmp_path).path == str(path)


def test_config_validates_stripes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ringstow.Config(stripe=["here", pathlib.Path("/mnt/b")])
    assert config.stripe == (str(tmp_path / "here"), "/mnt/b")
    assert hash(config) == hash(ringstow.Config(stripe=config.stripe))
    with pytest.raises(ringstow.InvalidStateError, match="is not there"):
        ringstow.save(state(), tmp_path / "step", config=config)
    assert not (tmp_path / "here").exists()


def test_striped_checkpoint_works_with_dcp(tmp_path, disks):
    config = ringstow.Config(stripe=disks)
    path = tmp_path / "step-1"
    dcp.save(state(), checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter(config=config))
    assert [len(os.listdir(disk / path.name)) for disk in disks] == [2, 2]
    loaded = state(1)
    reader = ringstow.dcp.StorageReader(config=config)
    dcp.load(loaded, checkpoint_id=path, storage_reader=reader)
    assert_same(loaded, state())
    assert_same(ringstow.load(path, config=config), state())


def test_a_striped_checkpoint_is_converted(tmp_path, disks):
    config = ringstow.Config(stripe=disks)
    ringstow.save(state()["w"], tmp_path / "step", config=config)
    convert(tmp_path / "step", tmp_path / "hf", target="hf", config=config)
    # A Hugging Face directory is for other programs, so it is never striped.
    assert [os.listdir(disk) for disk in disks] == [["step"], ["step"]]
    convert(tmp_path / "hf", tmp_path / "back", config=config)
    loaded = ringstow.load(tmp_path / "back", config=config)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state()["w"].items())
