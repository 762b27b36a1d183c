"""Checkpoints that get their name by one rename: what is left, and what must stay."""

from __future__ import annotations

import errno
import os
import re
import shutil
from unittest.mock import Mock

import pytest
import torch

from ringstow import _native
from ringstow._core import _files
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._deepspeed import _tags
from ringstow.integrations._lightning import _paths

NAMES = re.compile(r"checkpoint-\d+")


def test_a_left_over_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch, caplog):
    (tmp_path / ".ringstow-checkpoint-1").mkdir()
    refuses = Mock(side_effect=OSError(39, "Directory not empty"))
    # As NFS does, while another process reads a file.

    monkeypatch.setattr(shutil, "rmtree", refuses)
    part = _rename_when_complete.prepare(str(tmp_path / "checkpoint-2"), NAMES)
    assert os.path.isdir(part)
    assert ".ringstow-checkpoint-1" in caplog.text
    with pytest.raises(FileExistsError, match="checkpoint-2"):  # its own must be new
        _rename_when_complete.prepare(str(tmp_path / "checkpoint-2"), NAMES)


def test_a_file_that_had_the_name_of_a_checkpoint_fails_no_save(tmp_path):
    final = tmp_path / "checkpoint-1"
    final.write_text("mine")
    for _ in range(2):
        _rename_when_complete.complete(_rename_when_complete.prepare(str(final), NAMES), str(final))
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_the_directories_above_a_checkpoint_are_durable_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(_native, "sync_dir", synced.append)
    _rename_when_complete.prepare(str(tmp_path / "run" / "checkpoints" / "checkpoint-1"), NAMES)
    assert synced == [str(tmp_path), str(tmp_path / "run")]


def test_a_sync_that_fails_after_the_swap_keeps_the_older_checkpoint(tmp_path, monkeypatch):
    final = tmp_path / "checkpoint-1"
    final.mkdir()
    (final / "old").touch()
    part = _rename_when_complete.prepare(str(final), NAMES)
    fails = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(_native, "sync_dir", fails)
    with pytest.raises(OSError, match="Input/output"):
        _rename_when_complete.take_name(part, str(final))
    assert not os.path.exists(part)  # which the caller discards
    assert os.listdir(tmp_path / ".ringstow_replaced-checkpoint-1") == ["old"]


def test_a_save_of_another_engine_leaves_what_names_the_latest_tag(tmp_path, monkeypatch):
    sync = _files.sync

    def other_begins(path):
        sync(path)
        _rename_when_complete.end(_rename_when_complete.begin(str(tmp_path / "actor1")))

    monkeypatch.setattr(_files, "sync", other_begins)
    _tags.name_latest(str(tmp_path), "critic1")
    assert (tmp_path / "latest").read_text() == "critic1"


def test_a_save_leaves_what_ringstow_keeps_in_a_run(tmp_path):
    kept = ["run.json", "node.json", "history.jsonl", "history.jsonl.1", "manager", "keep-tag1"]
    names = [f".ringstow-{name}" for name in [*kept, "tag0"]]
    for name in names:
        (tmp_path / name).touch()
    for name in ("promotions", "spares"):
        (tmp_path / f".ringstow-{name}").mkdir()
    _rename_when_complete.end(_rename_when_complete.begin(str(tmp_path / "keep-tag1")))
    left = {name.removeprefix(".ringstow-") for name in os.listdir(tmp_path)}
    assert left == {*kept, "promotions", "spares"}
    assert (tmp_path / ".ringstow-keep-tag1").is_dir(), "its own leftover goes"


def test_what_a_killed_process_named_the_latest_tag_with_goes_with_the_next_save(tmp_path):
    left = tmp_path / ".ringstow-latest-critic1"
    left.touch()
    with _rename_when_complete.kept(str(tmp_path / "latest-critic2")) as new, open(new, "x"):
        _rename_when_complete.end(_rename_when_complete.begin(str(tmp_path / "actor1")))
    assert sorted(os.listdir(tmp_path)) == [".ringstow-actor1", ".ringstow-latest-critic2"]


refuse_to_swap = Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_lightning_left_gives_its_place_to_a_checkpoint(tmp_path, monkeypatch, kind, can_swap):
    last, beside = str(tmp_path / "last.ckpt"), tmp_path / ".ringstow-last.ckpt"
    torch.save({}, last) if kind == "file" else os.symlink("away", last)
    if not can_swap:
        monkeypatch.setattr(_native, "swap_names", refuse_to_swap)
    assert _paths.place_for(last, striped=False) == str(beside)
    (beside / "new").mkdir(parents=True)
    _paths.put(str(beside), last)
    assert os.listdir(last) == ["new"]
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("call", ["first", "second"])
def test_kill_between_two_renames_leaves_lightning_what_it_had(tmp_path, monkeypatch, call):
    last, beside = str(tmp_path / "last.ckpt"), str(tmp_path / ".ringstow-last.ckpt")
    os.symlink("away", last)
    os.mkdir(beside)
    rename, calls = os.rename, []

    class Killed(BaseException):
        pass

    def killed(one, other):
        rename(one, other)
        calls.append(other)
        if call == "first" or len(calls) == 2:
            monkeypatch.setattr(os, "rename", lambda *_: None)  # nothing happens any more
            raise Killed

    monkeypatch.setattr(_native, "swap_names", refuse_to_swap)
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(Killed):
        _paths.put(beside, last)
    monkeypatch.setattr(os, "rename", rename)
    _paths.place_for(last, striped=False)
    assert os.path.islink(last) if call == "first" else os.path.isdir(last)
    assert not list(tmp_path.glob(".*"))
