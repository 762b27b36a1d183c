"""Loads wait, for a bounded time, for what another host has saved; on a local disk they do not."""

import shutil

import pytest
import torch

import ringstow
from ringstow import _native
from ringstow._ranks import _shared_fs_lag

STATE = {"a": torch.arange(10.0)}


class Clock:
    """A time that passes in sleeps alone, and what happens after each."""

    def __init__(self, monkeypatch, *events, shared="nfs4"):
        self.now, self.events = 0.0, list(events)
        monkeypatch.setattr(_shared_fs_lag.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(_shared_fs_lag.time, "sleep", self.sleep)
        monkeypatch.setattr(_native, "shared_file_system", lambda path: shared)

    def sleep(self, seconds):
        self.now += max(seconds, 1.0)
        if self.events:
            self.events.pop(0)()


def nothing():
    pass


@pytest.fixture
def path(tmp_path):
    ringstow.save(STATE, tmp_path / "step-1")
    return tmp_path / "step-1"


def hide_shard(path):
    """Hide the shard; return a function that shows it again."""
    (shard,) = path.glob("*.safetensors")
    hidden = path.parent / "hidden"
    shard.rename(hidden)
    return lambda: hidden.rename(shard)


@pytest.mark.parametrize("way", ["load", "load_into"])
def test_load_waits_for_files_that_the_manifest_names(path, monkeypatch, caplog, way):
    clock = Clock(monkeypatch, nothing, nothing, hide_shard(path))
    state = {"a": torch.zeros(10)}
    if way == "load":
        state = ringstow.load(path)
    else:
        ringstow.load_into(state, path)
    assert torch.equal(state["a"], STATE["a"])
    assert clock.now == 3
    (record,) = caplog.records
    assert "waiting up to 90 s" in record.message
    assert str(path) in record.message


@pytest.mark.parametrize(("shared", "waits_s"), [("nfs4", _shared_fs_lag.SEEN_S), (None, 0)])
def test_load_gives_up_in_time_and_on_a_local_disk_at_once(path, monkeypatch, shared, waits_s):
    clock = Clock(monkeypatch, shared=shared)
    hide_shard(path)
    with pytest.raises(ringstow.MissingFilesError):
        ringstow.load(path)
    assert clock.now == waits_s


def test_load_of_what_is_not_there_does_not_wait(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(FileNotFoundError):
        ringstow.load(tmp_path / "step-2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ringstow.NoCheckpointError):
        ringstow.load(tmp_path / "empty")
    assert clock.now == 0


def test_error_after_the_wait_is_the_last_one(path, monkeypatch):
    Clock(monkeypatch, lambda: shutil.rmtree(path))
    hide_shard(path)
    with pytest.raises(FileNotFoundError):
        ringstow.load(path)


def test_file_system_of_a_path_that_is_not_there_is_that_of_its_directory(tmp_path):
    assert _native.shared_file_system("/proc/none/at/all") == "proc"
    assert _native.shared_file_system(str(tmp_path / "none")) is None
