"""The writer in one process: saves, refusals, and cleaning up after failures."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pathlib
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, every_kind, load, plain
from support import assert_same, litter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ringstow
import ringstow.dcp
from ringstow.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam


def cause(caught):
    """Return the rank's error that DCP wraps."""
    return next(iter(caught.value.failures.values()))[0]


class Failing(DefaultSavePlanner):
    """Fails at the named moment."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def _at(self, moment):
        if moment == self.moment:
            raise RuntimeError(f"failed in {moment}")

    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)
        self._at("set_up_planner")

    def create_local_plan(self):
        self._at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, plans):
        self._at("create_global_plan")
        return super().create_global_plan(plans)

    def finish_plan(self, plan):
        self._at("finish_plan")
        return super().finish_plan(plan)

    def resolve_data(self, item):
        self._at("resolve_data")
        return super().resolve_data(item)


MOMENTS = [
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
]


def test_round_trip(tmp_path):
    state = every_kind()
    writer = StorageWriter()
    metadata = dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)
    assert_same(load(tmp_path / "c", state), plain(state))
    assert metadata.storage_data is None
    assert writer.report.tensor_bytes > 0
    assert litter(tmp_path / "c") == [".metadata"]


def test_whole_state_loads_nested_without_a_target(tmp_path):
    state = every_kind()
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=StorageWriter())
    reader = StorageReader(tmp_path / "c")
    found = _load_state_dict_from_keys(storage_reader=reader)
    expected = plain(state)
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
    part = _load_state_dict_from_keys({"optimizer"}, storage_reader=reader)
    assert part.keys() == {"optimizer"}


def test_planner_without_flattening_keeps_its_keys(tmp_path):
    state = {"a.b": torch.ones(2), "$c": torch.zeros(3), "d": {"e": 1}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter(), planner=planner)
    found = {"a.b": torch.zeros(2), "$c": torch.ones(3), "d": None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, checkpoint_id=tmp_path, storage_reader=StorageReader(), planner=planner)
    assert_same(found, state)


def test_earlier_checkpoint_is_replaced_completely(tmp_path):
    writer = StorageWriter(tmp_path)
    dcp.save({"a": torch.ones(1000), "b": 1}, storage_writer=writer)
    dcp.save({"a": torch.zeros(10)}, storage_writer=writer)
    assert_same(load(tmp_path, {"a": torch.zeros(10)}), {"a": torch.zeros(10)})
    assert StorageReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"a"}
    assert litter(tmp_path) == [".metadata"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_failure_at_any_moment_keeps_checkpoint_and_writer(moment, tmp_path):
    writer = StorageWriter(tmp_path)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match=f"failed in {moment}") as caught:
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer, planner=Failing(moment))
    assert_same(load(tmp_path, {"a": torch.ones(3)}), {"a": torch.ones(3)})
    dcp.save({"a": torch.full((3,), 2.0)}, storage_writer=writer)
    assert_same(load(tmp_path, {"a": torch.ones(3)}), {"a": torch.full((3,), 2.0)})
    assert caught.value.failures.keys() == {0}


def test_another_writer_can_save_where_one_has_failed(tmp_path):
    failed = StorageWriter(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.ones(3)}, storage_writer=failed, planner=Failing("resolve_data"))
    dcp.save({"a": torch.zeros(3)}, storage_writer=StorageWriter(tmp_path))
    failed.close()  # must not remove the other writer's files
    assert_same(load(tmp_path, {"a": torch.ones(3)}), {"a": torch.zeros(3)})
    assert caught.value.failures


@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_the_writer_cleans_up_a_failed_save(how, tmp_path):
    writer = StorageWriter(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=Failing("resolve_data"))
    if how == "close":
        writer.close()
    del writer
    gc.collect()
    assert litter(tmp_path) == []
    ringstow.save({"a": torch.ones(1)}, tmp_path)  # the directory is free


def test_failed_save_of_one_rank_leaves_nothing_while_its_writer_lives(tmp_path):
    """Regression: manifest.json.part stayed, although the error says that all was removed."""
    writer = StorageWriter(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=Failing("resolve_data"))
    assert os.listdir(tmp_path) == []
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert_same(load(tmp_path / "c", {"a": torch.zeros(3)}), {"a": torch.ones(3)})


@pytest.mark.filterwarnings("ignore")
def test_bad_items_are_named_together_and_nothing_written(tmp_path):
    state = {
        "quantized": torch.quantize_per_tensor(torch.eye(3), 1, 0, torch.quint8),
        "good": torch.ones(1),
        "meta": torch.empty(3, device="meta"),
    }
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    error = cause(caught)
    assert type(error) is ringstow.UnsupportedError
    assert "quantized is quantized" in str(error)
    assert "meta is on the meta device" in str(error)
    assert "good" not in str(error)


def test_save_without_a_path_is_refused():
    with pytest.raises(CheckpointException, match="there is no path to save to"):
        dcp.save({"a": 1}, storage_writer=StorageWriter())


@pytest.mark.parametrize("bad", ["https://host/key", "", 5, b"raw", "a\0b"])
def test_checkpoint_id_that_is_not_a_path_is_refused(bad):
    assert not StorageWriter.validate_checkpoint_id(bad)
    with pytest.raises(ringstow.InvalidStateError, match="is not a path"):
        StorageWriter().reset(bad)
    assert not StorageReader.validate_checkpoint_id(bad)
    with pytest.raises(ringstow.InvalidStateError, match="is not a path"):
        StorageReader(bad)


def test_object_store_is_read_and_not_written_to():
    url = "s3://bucket/key"
    assert not StorageWriter.validate_checkpoint_id(url)
    with pytest.raises(ringstow.InvalidStateError, match="is not a path"):
        StorageWriter().reset(url)
    assert StorageReader.validate_checkpoint_id(url)
    assert StorageReader(url).checkpoint_id == url


def test_relative_path_is_resolved_at_construction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = StorageWriter(pathlib.Path("c"))
    assert writer.checkpoint_id == str(tmp_path / "c")
    monkeypatch.chdir("/")
    dcp.save({"a": 1}, storage_writer=writer)
    assert (tmp_path / "c" / "manifest.json").exists()


def test_checkpoint_without_its_mark_is_valid(tmp_path, caplog):
    (tmp_path / ".metadata").mkdir()  # can't be replaced by a file
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    assert_same(load(tmp_path, {"a": torch.ones(2)}), {"a": torch.ones(2)})
    assert "is committed, but without .metadata" in caplog.text
    assert litter(tmp_path) == [".metadata"]


def test_torchs_reader_fails_with_a_hint_at_ringstow(tmp_path):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    with pytest.raises(ringstow.UnsupportedError, match="StorageReader"):
        dcp.FileSystemReader(tmp_path).read_metadata()


def test_planner_data_of_unknown_type_is_accepted(tmp_path):
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            return plans, dataclasses.replace(metadata, planner_data=threading.Lock())

    writer = StorageWriter(tmp_path)
    dcp.save({"a": {"b": torch.ones(2)}}, storage_writer=writer, planner=Planner())
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path))
    assert_same(found, {"a.b": torch.ones(2)})  # no paths: flat


def test_writer_pickles_without_its_running_save(tmp_path):
    writer = StorageWriter(tmp_path, ringstow.Config(pool_bytes=8 << 20))
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    writer.stage({"a": torch.ones(1 << 20)})
    text = pickle.dumps(writer)
    assert len(text) < 1000
    twin = pickle.loads(text)
    dcp.save({"a": torch.zeros(2)}, storage_writer=twin)
    assert_same(load(tmp_path, {"a": torch.ones(2)}), {"a": torch.zeros(2)})
    assert copy.deepcopy(writer).checkpoint_id == str(tmp_path)


def test_a_lone_surrogate_in_a_key_is_named(tmp_path):
    with pytest.raises(CheckpointException, match="lone surrogate"):
        dcp.save({"a\ud800": torch.ones(1)}, checkpoint_id=tmp_path, storage_writer=StorageWriter())


def test_a_forked_child_does_not_end_its_parents_save(tmp_path):
    writer = StorageWriter(tmp_path)

    class Forking(DefaultSavePlanner):
        def resolve_data(self, item):
            if not os.fork():
                try:
                    writer.close()
                finally:
                    os._exit(0)
            assert os.wait()[1] == 0
            return super().resolve_data(item)

    dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=Forking())
    assert_same(load(tmp_path, {"a": torch.ones(3)}), {"a": torch.ones(3)})


def test_blank_differs_from_every_kind():
    """Otherwise the round trips above would prove nothing."""
    with pytest.raises(AssertionError):
        assert_same(blank(every_kind()), plain(every_kind()))


def test_ringstow_loads_what_dcp_saved(tmp_path):
    state = every_kind()
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    assert_same(dict(sorted(ringstow.load(tmp_path).items())), dict(sorted(plain(state).items())))
    assert ringstow.load(tmp_path, prefix="$odd.none") == {"$odd": {"none": None}}
    target = blank(plain(state))
    ringstow.load_into(target, tmp_path)
    assert_same(target, plain(state))
    assert ringstow.verify(tmp_path).ok


def test_dcp_pickles_are_refused_unless_allowed(tmp_path):
    state = {"a": np.datetime64("2020-01-01")}
    writer = StorageWriter(allow_pickle=True)
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=writer)
    with pytest.raises(ringstow.UnsupportedError, match="a is an object that torch.load does not"):
        ringstow.load(tmp_path)
    assert ringstow.load(tmp_path, allow_pickle=True) == state


def test_ctrl_c_waits_for_the_write_to_end(tmp_path, monkeypatch):
    class Job:
        """Raises KeyboardInterrupt while it stages, and needs two waits to stop."""

        calls = ()
        left = 2

        def wait_staged(self, timeout):
            raise KeyboardInterrupt

        def done(self):
            return self.left == 0

        def cancel(self):
            self.calls += ("cancel",)

        def wait(self, timeout=None):
            self.left -= 1
            self.calls += ("wait",)

    job = Job()
    monkeypatch.setattr(ringstow._native, "start_write", lambda *arguments: job)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    assert type(cause(caught)) is KeyboardInterrupt
    assert job.calls == ("cancel", "wait", "wait")
