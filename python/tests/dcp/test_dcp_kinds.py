"""DCP saves tensors that torch's planner can't plan, and a module sees what a load fills."""

from __future__ import annotations

import gc
import logging
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from tensor_list import KINDS, assert_equal, blank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ringstow
import ringstow.dcp
from ringstow.dcp import _private

pytestmark = pytest.mark.filterwarnings("ignore")
MATRIX = torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0], [0, 0, 0, 0], [0, 5, 0, 4]])
OTHER = torch.eye(4)


class Plain(ringstow.dcp.SavePlanner):
    """A planner that plans as torch's does, since it overrides a step."""

    def create_local_plan(self):
        return super().create_local_plan()


class Failing(DefaultSavePlanner):
    """A planner that DCP can't make a plan with."""

    def create_local_plan(self):
        raise OSError("no plan")


@pytest.mark.parametrize("then", ["close", "reset", "save", "leave"])
def test_a_planner_that_failed_gets_its_tensors_back(then, tmp_path):
    table, writer, planner = MATRIX.to_sparse_csr(), ringstow.dcp.StorageWriter(), Failing()
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save({"t": table}, storage_writer=writer, checkpoint_id=tmp_path / "a", planner=planner)
    if then == "save":
        dcp.save({"t": table}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    elif then == "leave":
        del writer
        gc.collect()
    else:
        getattr(writer, then)()
    assert planner.state_dict["t"] is table


def save(state, path, planner=None):
    writer = ringstow.dcp.StorageWriter()
    dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)


def load(state, path):
    dcp.load(state, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())


def module_of(tensor):
    module = torch.nn.Module()
    module.register_buffer("table", tensor)
    return module


def jagged(*lengths):
    rows = [torch.full((length, 2), float(length)) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("kind", [None, DefaultSavePlanner, ringstow.dcp.SavePlanner, Plain])
def test_planners_that_derive_from_torchs_save_every_kind(kind, tmp_path):
    names = ("sparse CSR", "sparse BSC", "jagged", "uint4", "float32")
    state = {"nested": {name: KINDS[name]() for name in names}}
    planner = kind and kind()
    for number in range(2):  # the second plan may be an earlier one
        save(state, tmp_path / f"{number}", planner)
        found = ringstow.load(tmp_path / f"{number}")["nested"]
        for name, wanted in state["nested"].items():
            assert_equal(found[name], wanted)
    if planner is not None:  # it has the state itself, not what stood for it
        assert planner.state_dict["nested.uint4"] is state["nested"]["uint4"]


def test_no_other_writer_gets_what_stands_for_a_tensor(tmp_path):
    planner = ringstow.dcp.SavePlanner()
    writer = dcp.FileSystemWriter(tmp_path / "c")
    for _ in range(2):
        with pytest.raises(dcp.api.CheckpointException):
            dcp.save({"w": KINDS["uint4"]()}, storage_writer=writer, planner=planner)
        save({"w": KINDS["uint4"]()}, tmp_path / "d", planner)


@pytest.mark.parametrize(
    ("make", "here", "there"),
    [
        (torch.Tensor.to_sparse, -MATRIX, MATRIX),
        (torch.Tensor.to_sparse_csr, torch.zeros(4, 4), MATRIX),
        (torch.Tensor.to_sparse_csc, MATRIX, OTHER),
        (lambda dense: dense.to_sparse_bsr((2, 2)), torch.zeros(4, 4), MATRIX),
        (lambda lengths: jagged(*lengths) * len(lengths), (2, 3), (2, 3)),
        (lambda lengths: jagged(*lengths) * 0 + 7, (2, 0), (2, 0)),
    ],
)
def test_a_module_sees_what_fills_its_state_dict(make, here, there, tmp_path):
    saved, module = make(there), module_of(make(here))
    save({"m": {"table": saved}}, tmp_path / "c")
    state = {"m": module.state_dict()}
    load(state, tmp_path / "c")
    assert_equal(module.table, saved)
    assert_equal(state["m"]["table"], saved)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (OTHER.to_sparse(), MATRIX.to_sparse(), r"values \[4\].*\[5\].*\"model\": model"),
        (jagged(2, 3), jagged(3, 2), r"lengths \[2, 3\] here and one of \[3, 2\]"),
        (MATRIX.to_sparse(), MATRIX.double().to_sparse(), "values of torch.float32 .*float64"),
        (MATRIX.to_sparse_csr(), MATRIX.to_sparse(), "sparse_csr here and a sparse_coo"),
    ],
)
def test_what_cannot_be_filled_is_refused_and_nothing_changes(here, there, said, tmp_path):
    save({"m": {"table": there, "b": torch.ones(2)}}, tmp_path / "c")
    module, before = module_of(here), here.clone()
    state = {"m": {**module.state_dict(), "b": torch.zeros(2)}}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(state, tmp_path / "c")
    (error,) = (one for one, _ in caught.value.failures.values())
    assert isinstance(error, ringstow.KeyMismatchError)
    assert re.search(said, str(error)), error
    assert state["m"]["b"].tolist() == [0, 0]
    assert_equal(module.table, before)


def test_an_object_and_none_take_a_sparse_tensor_of_any_number_of_elements(tmp_path):
    save({"m": {"table": MATRIX.to_sparse()}}, tmp_path / "c")
    module = module_of(torch.zeros(4, 4).to_sparse())
    load({"m": module}, tmp_path / "c")
    assert_equal(module.table, MATRIX.to_sparse())
    state = {"m": {"table": None}}
    load(state, tmp_path / "c")
    assert_equal(state["m"]["table"], MATRIX.to_sparse())


def test_tensors_that_share_indices_here_must_share_them_in_the_checkpoint(tmp_path):
    indices = torch.zeros(2, 5, dtype=torch.long)
    state = {name: torch.sparse_coo_tensor(indices, torch.zeros(5), (4, 4)) for name in "ab"}
    save({"a": MATRIX.to_sparse(), "b": MATRIX.T.to_sparse()}, tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match="a and b share memory here and differ"):
        load(state, tmp_path / "c")


def test_a_torch_that_does_not_show_its_state_gets_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_private, "loaded_object", lambda key: None)
    save({"m": {"table": MATRIX.to_sparse()}}, tmp_path / "c")
    state = {"m": module_of(OTHER.to_sparse()).state_dict()}
    with caplog.at_level(logging.WARNING, "ringstow"):
        load(state, tmp_path / "c")
    assert_equal(state["m"]["table"], MATRIX.to_sparse())
    assert "a module does not see" in caplog.text


@on_ranks(2)
def test_ranks_plan_and_load_every_kind_together(rank, tmp_path):
    names = ("sparse CSR", "sparse COO", "jagged", "uint4")
    for kind in (DefaultSavePlanner, ringstow.dcp.SavePlanner):
        state = {name: KINDS[name]() for name in names} | {f"own {rank}": KINDS["sparse BSR"]()}
        save(state, tmp_path / kind.__module__, kind())
        into = {name: blank(one) for name, one in state.items()}
        load(into, tmp_path / kind.__module__)
        for name, wanted in state.items():
            assert_equal(into[name], wanted, grad=False)
        assert {"own 0", "own 1"} <= {*ringstow.load(tmp_path / kind.__module__)}
