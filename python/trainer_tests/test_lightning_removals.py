"""A removal waits for the commit of the save in flight, and removes checkpoints only."""

from __future__ import annotations

import os

import pytest
import torch
from lightning_runs import RingstowCheckpointIO, in_flight, saved

import ringstow


def test_a_removal_waits_for_the_commit_of_the_save_in_flight(held, tmp_path):
    io = in_flight(held, tmp_path)
    io.remove_checkpoint(tmp_path / "old-1.ckpt")
    assert ringstow.verify(tmp_path / "old-1.ckpt").ok  # a kill now would leave this one
    held.release()
    io.teardown()
    assert os.listdir(tmp_path) == ["new-2.ckpt"]


def test_a_removal_does_not_happen_if_the_save_fails(held, tmp_path):
    io = in_flight(held, tmp_path)
    io.remove_checkpoint(tmp_path / "old-1.ckpt")
    io._flight.handle.cancel()
    held.release()
    with pytest.raises(ringstow.SaveCancelledError) as caught:
        io.teardown()
    assert "kept" in caught.value.__notes__[0]
    assert os.listdir(tmp_path) == ["old-1.ckpt"]
    io.teardown()  # raised once


def test_a_removal_of_what_is_in_flight_waits_for_it(held, tmp_path):
    io = in_flight(held, tmp_path)
    io.remove_checkpoint(tmp_path / "new-2.ckpt")
    held.release()
    io.teardown()
    assert os.listdir(tmp_path) == ["old-1.ckpt"]


def test_a_failed_removal_is_raised(held, tmp_path):
    io = in_flight(held, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    io.remove_checkpoint(tmp_path / "notes.txt")
    held.release()
    with pytest.raises(ringstow.InvalidStateError, match="notes.txt"):
        io.teardown()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_removed(legacy, tmp_path):
    torch.save({"a": 1}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not legacy)
    RingstowCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_directories_of_dcp_are_removed_with_lightnings_file(tmp_path):
    import torch.distributed.checkpoint as dcp

    import ringstow.dcp

    for name, writer in [("a.ckpt", None), ("b.ckpt", ringstow.dcp.StorageWriter())]:
        path = tmp_path / name
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path, storage_writer=writer, no_dist=True)
        torch.save({}, path / "meta.pt")
        RingstowCheckpointIO().remove_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_save_left_is_removed(tmp_path):
    saved(tmp_path / "a-1.ckpt")
    manifest = tmp_path / "a-1.ckpt" / "manifest.json"
    manifest.rename(f"{manifest}.part")
    for shard in (tmp_path / "a-1.ckpt").glob("*.safetensors"):
        shard.rename(f"{shard}.part")
    RingstowCheckpointIO().remove_checkpoint(tmp_path / "a-1.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_link_is_removed_and_its_target_stays(tmp_path):
    saved(tmp_path / "a-1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a-1.ckpt")
    io = RingstowCheckpointIO()
    io.remove_checkpoint(tmp_path / "last.ckpt")
    io.remove_checkpoint(tmp_path / "nothing.ckpt")
    assert os.listdir(tmp_path) == ["a-1.ckpt"]
    assert ringstow.verify(tmp_path / "a-1.ckpt").ok


def test_nothing_but_a_checkpoint_is_removed_or_replaced(tmp_path):
    import zipfile

    io = RingstowCheckpointIO()
    (tmp_path / "text").write_text("mine")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("a", "b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    for name in ("text", "data.zip", "folder"):
        with pytest.raises((ringstow.InvalidStateError, ringstow.NoCheckpointError), match=name):
            io.remove_checkpoint(tmp_path / name)
    for name in ("text", "data.zip"):
        with pytest.raises(ringstow.InvalidStateError, match=name):
            io.save_checkpoint({}, tmp_path / name)
    saved(tmp_path / "a-1.ckpt")
    (tmp_path / "a-1.ckpt" / "mine").touch()
    io.remove_checkpoint(tmp_path / "a-1.ckpt")
    assert os.listdir(tmp_path / "a-1.ckpt") == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["a-1.ckpt", "data.zip", "folder", "text"]
