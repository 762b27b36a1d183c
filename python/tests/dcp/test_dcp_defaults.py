"""ringstow instead of torch's own classes, for programs that pass only a path."""

from __future__ import annotations

import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, every_kind, plain
from support import assert_same
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch_has import needs_use_collectives

import ringstow
import ringstow.dcp
from ringstow.dcp import _drop_in

pytestmark = pytest.mark.torch_seam


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


def test_the_stock_names_are_ours(swapped, tmp_path):
    writer = dcp.FileSystemWriter(path=tmp_path)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert is_ours(tmp_path)
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=filesystem.FileSystemReader(path=tmp_path))
    assert_same(target, {"a": torch.ones(3)})
    assert writer.path == tmp_path
    assert pickle.loads(pickle.dumps(writer)).path == tmp_path


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


@pytest.mark.parametrize("how", ["call", "leave"])
def test_it_can_be_undone(how, tmp_path):
    modules = (dcp, filesystem, _storage_utils, format_utils)
    before = [(m.FileSystemWriter, m.FileSystemReader) for m in modules]
    assert before == [(_drop_in.StockWriter, _drop_in.StockReader)] * len(modules)
    if how == "call":
        ringstow.dcp.use_by_default()()
    else:
        with pytest.raises(KeyError), ringstow.dcp.use_by_default():
            raise KeyError
    assert [(m.FileSystemWriter, m.FileSystemReader) for m in modules] == before
    dcp.save({"a": 1}, checkpoint_id=tmp_path)
    assert not is_ours(tmp_path)


def test_it_can_be_called_within_itself():
    config = ringstow.Config(engine="portable")
    with ringstow.dcp.use_by_default(config):
        with ringstow.dcp.use_by_default() as inner:
            assert dcp.FileSystemWriter("x")._config.engine != "portable"
            inner()
            assert dcp.FileSystemWriter("x")._config.engine == "portable"
        assert dcp.FileSystemWriter is _drop_in.FileSystemWriter
    assert dcp.FileSystemWriter is _drop_in.StockWriter


def test_torchs_own_tools_convert_ours(swapped, tmp_path):
    state = {"a": {"b": torch.arange(6.0)}, "n": 3}
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    format_utils.dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    assert_same(torch.load(tmp_path / "file.pt"), state)
    format_utils.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "back")
    assert is_ours(tmp_path / "back")
    assert_same(fetch(tmp_path / "back", state), state)


def test_undo_restores_modules_imported_meanwhile(monkeypatch):
    name = "torch.distributed.checkpoint.late"
    with ringstow.dcp.use_by_default():
        late = types.ModuleType(name)
        late.Writer = dcp.FileSystemWriter
        monkeypatch.setitem(sys.modules, name, late)
    assert late.Writer is _drop_in.StockWriter


def test_modules_that_keep_torchs_classes_are_named(monkeypatch, caplog):
    early = types.ModuleType("some_trainer.saving")
    early.Writer = dcp.FileSystemWriter
    early.Odd = type("Odd", (), {"__class__": property(lambda self: 1 / 0)})()
    monkeypatch.setitem(sys.modules, "some_trainer.saving", early)
    with ringstow.dcp.use_by_default():
        assert early.Writer is _drop_in.StockWriter
    assert "some_trainer.saving.Writer" in caplog.text
    assert "ringstow.dcp._drop_in" not in caplog.text
    caplog.clear()
    derived = type("Derived", (_drop_in.StockReader,), {"__module__": "other_trainer"})
    with ringstow.dcp.use_by_default():
        assert "other_trainer.Derived" in caplog.text
        assert "some_trainer" not in caplog.text  # named once
    del derived


def test_options_apply_to_all_saves_and_loads(tmp_path):
    config = ringstow.Config(engine="portable")
    with ringstow.dcp.use_by_default(config, allow_pickle=True):
        writer = dcp.FileSystemWriter(tmp_path)
        odd = {"a": np.datetime64("2020-01-01")}  # a type that ringstow cannot store
        dcp.save(odd, storage_writer=writer)
        assert writer.report.engine == "portable"
        assert fetch(tmp_path, {"a": None}) == odd
    with ringstow.dcp.use_by_default():
        with pytest.raises(CheckpointException, match=r"needs numpy\."):
            fetch(tmp_path, {"a": None})
        with pytest.raises(CheckpointException, match=r"a is a numpy\.datetime64.*x\.astype"):
            dcp.save(odd, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
)
def test_in_whatever_order_they_are_undone_the_newest_in_force_counts(order):
    given = [(ringstow.Config(queue_depth=3 + n), n == 1) for n in range(3)]
    swaps = [ringstow.dcp.use_by_default(config, allow_pickle=pickles) for config, pickles in given]
    in_force = [0, 1, 2]
    for number in order:
        swaps[number]()
        swaps[number]()  # nothing more
        in_force.remove(number)
        settings = (_drop_in.Settings.config, _drop_in.Settings.allow_pickle)
        assert settings == (given[in_force[-1]] if in_force else (None, False))
    assert filesystem.FileSystemWriter is _drop_in.StockWriter
