"""The file ``.metadata`` that a DCP save leaves beside its manifest."""

from __future__ import annotations

import os
import tracemalloc

import ringstow
from ringstow import _native
from ringstow.dcp import _mark


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    step = tmp_path / "step"
    step.mkdir()
    for name in (".metadata", ".metadata.part"):
        (step / name).symlink_to(victim)
    _mark.write(str(step))
    assert victim.read_text() == "precious"
    assert os.listdir(step) == [".metadata"]
    assert not (step / ".metadata").is_symlink()


def test_metadata_of_endless_length_is_not_read(tmp_path, caplog):
    tracemalloc.start()
    with open(tmp_path / ".metadata", "wb") as file:
        file.write(b"\x80" + _mark._TORCHS + b" __0_0.distcp ")
        file.truncate(1 << 40)
    (tmp_path / "__0_0.distcp").write_bytes(b"theirs")
    _mark.write(str(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * _mark._BYTES_MAX
    assert (tmp_path / "__0_0.distcp").exists()
    assert "Remove its *.distcp files" in caplog.text


def test_the_directory_is_synced_after_the_rename(tmp_path, monkeypatch):
    synced = []
    fsync, sync_dir = os.fsync, _native.sync_dir

    def recorded(opened):
        synced.append(os.readlink(f"/proc/self/fd/{opened}"))
        fsync(opened)

    def recorded_dir(path):
        synced.append(path)
        sync_dir(path)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(_native, "sync_dir", recorded_dir)
    _mark.write(str(tmp_path))
    assert synced == [str(tmp_path / ".metadata.part"), str(tmp_path)]


def test_what_a_kill_has_left_of_it_goes_with_the_checkpoint(tmp_path):
    step = tmp_path / "step-1"
    ringstow.save({"step": 1}, step, step=1)
    (step / ".metadata.part").write_bytes(b"half")
    ringstow.remove(step)
    assert not step.exists()
