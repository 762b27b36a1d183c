"""What a rank's writes and reads log, report and pass on to callbacks."""

from __future__ import annotations

import logging
import pickle
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import flip
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow._core import _formatting
from ringstow._reports import _done_callbacks
from ringstow.dcp import _saves_in_progress


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, logger="ringstow")
    outcomes = []
    with ringstow.on_done(outcomes.append):
        yield outcomes


def state():
    return {"w": torch.arange(1 << 16, dtype=torch.float32)}


def lines(caplog):
    _done_callbacks.flush()
    return [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]


def test_write_and_read_of_a_rank_are_reported(heard, caplog, at):
    writer, reader = ringstow.dcp.StorageWriter(), ringstow.dcp.StorageReader()
    dcp.save(state(), checkpoint_id=at / "c", storage_writer=writer, no_dist=True)
    dcp.load(state(), checkpoint_id=at / "c", storage_reader=reader, no_dist=True)
    said = _formatting.of_save(writer.report, "rank 0"), _formatting.of_load(reader.report)
    assert lines(caplog) == list(said)
    assert [(one.kind, one.report) for one in heard] == [
        ("save", writer.report),
        ("load", reader.report),
    ]
    assert writer.report.blocked_seconds >= writer.report.seconds.total


def test_failed_write_and_commit_are_failures(heard, at, monkeypatch):
    full = Mock(side_effect=OSError(28, "full"))
    for place, function in ((_native, "start_write"), (_saves_in_progress.Save, "commit")):
        writer = ringstow.dcp.StorageWriter()
        with monkeypatch.context() as patch:
            patch.setattr(place, function, full)
            with pytest.raises(CheckpointException):
                dcp.save(state(), checkpoint_id=at / "c", storage_writer=writer, no_dist=True)
    _done_callbacks.flush()
    ends = [(one.kind, one.report is None, one.error and one.error.errno) for one in heard]
    assert ends == [("save", True, 28), ("save", False, None), ("save", True, 28)]


def test_damage_is_a_failed_load(heard, at):
    writer, reader = ringstow.dcp.StorageWriter(), ringstow.dcp.StorageReader()
    dcp.save(state(), checkpoint_id=at / "c", storage_writer=writer, no_dist=True)
    (shard,) = (at / "c").glob("*.safetensors")
    flip(shard, -1)
    with pytest.raises(CheckpointException):
        dcp.load(state(), checkpoint_id=at / "c", storage_reader=reader, no_dist=True)
    _done_callbacks.flush()
    assert [one.kind for one in heard] == ["save", "load"]
    assert isinstance(heard[1].error, ringstow.CorruptCheckpointError)


def test_background_save_reports_what_staging_cost(heard, caplog, at):
    writer = ringstow.dcp.StorageWriter()
    dcp.async_save(state(), checkpoint_id=at / "c", storage_writer=writer, no_dist=True).result()
    (line,) = lines(caplog)
    assert line == _formatting.of_save(writer.report, "rank 0")
    assert writer.report.blocked_seconds > 0


def test_copy_of_a_writer_does_not_know_what_training_waited(at):
    writer = pickle.loads(pickle.dumps(ringstow.dcp.StorageWriter()))
    dcp.save(state(), checkpoint_id=at / "c", storage_writer=writer, no_dist=True)
    assert writer.report.blocked_seconds is None
