"""ringstow in the place of torch's own classes, for programs that pass a path only."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, every_kind, plain
from support import assert_same
from test_dcp_writer import cause
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch_has import needs_use_collectives

import ringstow
import ringstow.dcp


@pytest.fixture
def swapped():
    with ringstow.dcp.use_by_default():
        yield


def is_ours(path):
    return (path / "manifest.json").exists()


def fetch(path, state):
    target = blank(state)
    dcp.load(target, checkpoint_id=path)
    return target


def test_a_path_is_enough(swapped, tmp_path):
    state = every_kind()
    dcp.save(state, checkpoint_id=tmp_path)
    assert is_ours(tmp_path)
    assert_same(fetch(tmp_path, state), plain(state))
    dcp.async_save({"a": 1}, checkpoint_id=tmp_path / "b").result()
    assert is_ours(tmp_path / "b")


def test_the_stock_names_are_ours_with_the_stock_arguments(swapped, tmp_path, caplog):
    caplog.set_level("INFO", "ringstow")
    writer = dcp.FileSystemWriter(
        tmp_path, single_file_per_rank=True, sync_files=False, thread_count=4, overwrite=True
    )
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert is_ours(tmp_path)
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=filesystem.FileSystemReader(path=tmp_path))
    assert_same(target, {"a": torch.ones(3)})
    dcp.FileSystemWriter(tmp_path, thread_count=4)
    assert caplog.text.count("FileSystemWriter(thread_count)") <= 1
    assert pickle.loads(pickle.dumps(writer)).checkpoint_id == str(tmp_path)


def test_overwrite_false_keeps_what_is_there(swapped, tmp_path):
    for wanted in (1, 2):
        writer = dcp.FileSystemWriter(tmp_path, overwrite=False)
        if wanted == 2:
            with pytest.raises(CheckpointException, match="holds a checkpoint already") as caught:
                dcp.save({"a": wanted}, storage_writer=writer)
            assert type(cause(caught)) is ringstow.InvalidStateError
        else:
            dcp.save({"a": wanted}, storage_writer=writer)
    assert fetch(tmp_path, {"a": None}) == {"a": 1}


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"use_collectives": False}, marks=needs_use_collectives)]
)
def test_a_stock_checkpoint_still_loads(options, tmp_path):
    state = every_kind()
    dcp.save(state, checkpoint_id=tmp_path, **options)
    assert not is_ours(tmp_path)
    with ringstow.dcp.use_by_default():
        assert_same(fetch(tmp_path, state), plain(state))
        dcp.save({"a": 1}, checkpoint_id=tmp_path)  # over it
        assert fetch(tmp_path, {"a": None}) == {"a": 1}


def test_the_whole_state_comes_back_without_a_state_to_fill(swapped, tmp_path):
    dcp.save({"a": {"b": torch.ones(2)}}, checkpoint_id=tmp_path)
    state = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(tmp_path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert_same(state, {"a": {"b": torch.ones(2)}})


@pytest.mark.parametrize("how", ["call", "leave"])
def test_it_can_be_undone(how, tmp_path):
    before = [(m.FileSystemWriter, m.FileSystemReader) for m in (dcp, filesystem, _storage_utils)]
    if how == "call":
        ringstow.dcp.use_by_default()()
    else:
        with pytest.raises(KeyError), ringstow.dcp.use_by_default():
            raise KeyError
    after = [(m.FileSystemWriter, m.FileSystemReader) for m in (dcp, filesystem, _storage_utils)]
    assert after == before
    dcp.save({"a": 1}, checkpoint_id=tmp_path)
    assert not is_ours(tmp_path)


def test_what_was_given_holds_for_all(tmp_path):
    config = ringstow.Config(engine="portable")
    with ringstow.dcp.use_by_default(config, allow_pickle=True):
        writer = dcp.FileSystemWriter(tmp_path)
        odd = {"a": np.datetime64("2020-01-01")}  # which ringstow has no words for
        dcp.save(odd, storage_writer=writer)
        assert writer.report.engine == "portable"
        assert fetch(tmp_path, {"a": None}) == odd
    with ringstow.dcp.use_by_default():
        with pytest.raises(CheckpointException, match=r"needs numpy\."):
            fetch(tmp_path, {"a": None})
        with pytest.raises(CheckpointException, match=r"a is a numpy\.datetime64.*x\.astype"):
            dcp.save(odd, checkpoint_id=tmp_path)
