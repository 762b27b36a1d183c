"""Torch's own writer and ringstow save to the same directory in turn."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load
from support import assert_same
from test_dcp_writer import Failing
from torch.distributed.checkpoint.api import CheckpointException
from torch_has import needs_use_collectives

import ringstow
from ringstow.dcp import StorageReader, StorageWriter, _mark

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.torch_seam,
]


def state_of(number):
    return {"a": torch.full((1000,), float(number)), "n": number}


def save_by_ringstow(number, path, **options):
    dcp.save(state_of(number), checkpoint_id=path, storage_writer=StorageWriter(), **options)


def save_by_torch(number, path, **options):
    dcp.save(state_of(number), checkpoint_id=path, **options)


def load_by_torch(path):
    target = state_of(0)
    dcp.load(target, checkpoint_id=path)
    return target


def make_older(*files):
    """Date files back, because saves within one tick of the file system's clock look equal."""
    for file in files:
        os.utime(file, (1, 1))


def listing(path):
    return {file.name for file in path.iterdir()}


# Torch over ringstow.


def test_load_of_a_checkpoint_that_torch_saved_over_is_refused(tmp_path):
    save_by_ringstow(1, tmp_path)
    make_older(tmp_path / "manifest.json")
    save_by_torch(2, tmp_path)
    for read in (ringstow.load, ringstow.open):
        with pytest.raises(ringstow.InvalidStateError, match="saved over by PyTorch's own writer"):
            read(tmp_path)
    assert_same(load_by_torch(tmp_path), state_of(2))
    (tmp_path / ".metadata").unlink()
    assert_same(ringstow.load(tmp_path), state_of(1))


def test_dcp_load_of_a_checkpoint_that_torch_saved_over_is_refused(tmp_path, caplog):
    save_by_ringstow(1, tmp_path)
    make_older(tmp_path / "manifest.json")
    save_by_torch(2, tmp_path)
    target = state_of(0)
    with pytest.raises((AssertionError, CheckpointException)):
        dcp.load(target, checkpoint_id=tmp_path, storage_reader=StorageReader())
    assert_same(target, state_of(0))
    ours = [record for record in caplog.records if record.name == "ringstow"]
    (error,) = (record.message for record in ours if record.levelname == "ERROR")
    assert "saved over by PyTorch's own writer" in error


@needs_use_collectives
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_torch_overwrite_is_detected_across_modes(before, after, tmp_path):
    save_by_ringstow(1, tmp_path, use_collectives=before)
    checkpoint = tmp_path if before else tmp_path / "rank00000"
    make_older(checkpoint / "manifest.json")
    save_by_torch(2, tmp_path, use_collectives=after)
    with pytest.raises(ringstow.InvalidStateError, match="saved over by PyTorch's own writer"):
        ringstow.load(checkpoint)


def test_latest_skips_checkpoint_overwritten_by_torch(tmp_path):
    for step in (1, 2):
        save_by_ringstow(step, tmp_path / f"step-{step}")
    make_older(tmp_path / "step-2" / "manifest.json")
    save_by_torch(3, tmp_path / "step-2")
    assert ringstow.latest(tmp_path).path == str(tmp_path / "step-1")


# Ringstow over torch.


def test_a_dcp_save_over_one_of_torch_removes_the_files_it_lists(tmp_path):
    save_by_torch(1, tmp_path)
    (tmp_path / "__7_0.distcp").write_bytes(b"of somebody else")
    save_by_ringstow(2, tmp_path)
    assert_same(load(tmp_path, state_of(2)), state_of(2))
    assert {name for name in listing(tmp_path) if "distcp" in name} == {"__7_0.distcp"}


@pytest.mark.parametrize("moment", ["create_global_plan", "finish_plan"])
def test_failed_save_keeps_the_checkpoint_of_torch(moment, tmp_path):
    save_by_torch(1, tmp_path)
    with pytest.raises(CheckpointException):
        save_by_ringstow(2, tmp_path, planner=Failing(moment))
    assert_same(load_by_torch(tmp_path), state_of(1))


def test_a_save_killed_before_its_mark_is_loaded(tmp_path, monkeypatch):
    save_by_torch(1, tmp_path)
    make_older(tmp_path / ".metadata")
    monkeypatch.setattr(_mark, "write", lambda path: None)
    save_by_ringstow(2, tmp_path)
    assert_same(load(tmp_path, state_of(2)), state_of(2))


def test_plain_save_keeps_the_checkpoint_of_torch(tmp_path):
    save_by_torch(1, tmp_path)
    make_older(tmp_path / ".metadata")
    ringstow.save(state_of(2), tmp_path)
    assert_same(ringstow.load(tmp_path), state_of(2))
    assert_same(load_by_torch(tmp_path), state_of(1))


def test_a_mark_that_torch_did_not_write_is_ignored(tmp_path):
    ringstow.save(state_of(1), tmp_path)
    make_older(tmp_path / "manifest.json")
    (tmp_path / ".metadata").write_text('{"owner": "somebody else"}')
    assert_same(ringstow.load(tmp_path), state_of(1))
