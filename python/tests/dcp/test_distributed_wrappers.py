"""DTensors of wrappers are saved as one wrapper, and load in any layout, or are refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks, raised
from tensor_list import Scaled, scaled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import ringstow
import ringstow.dcp
import ringstow.distributed

pytestmark = pytest.mark.filterwarnings("ignore")
WHOLE = torch.arange(35.0).reshape(7, 5)


def pair(values):
    return TwoTensor(values.clone(), values + 100)


def sharded(whole, placement, *, blank=False):
    """Return this rank's part of a pair of tensors, uneven if their rows are."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    local = whole
    if placement.is_shard():
        chunks = whole.chunk(mesh.size(), placement.dim)
        rank = mesh.get_rank()
        local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    local = pair(local * 0 - 1 if blank else local)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


@on_ranks(2)
def test_shards_of_wrappers_load_in_another_layout(rank, tmp_path):
    state = {"w": sharded(WHOLE, Shard(0)), "c": sharded(WHOLE, Shard(1)), "r": pair(WHOLE)}
    handle = ringstow.distributed.save_async(state, tmp_path / "c")
    handle.result()
    whole = ringstow.load(tmp_path / "c")
    for name in ("w", "c", "r"):
        assert type(whole[name]) is TwoTensor
        assert whole[name].shape == WHOLE.shape
        assert whole[name].a.equal(WHOLE)
        assert whole[name].b.equal(WHOLE + 100)
    for placement in (Shard(0), Shard(1), Replicate()):
        into = {name: sharded(WHOLE, placement, blank=True) for name in ("w", "c")}
        into["r"] = pair(WHOLE * 0)
        inner = into["w"].to_local().a.data_ptr()
        ringstow.distributed.load_into(into, tmp_path / "c")
        assert into["w"].to_local().a.data_ptr() == inner  # filled in place
        wanted = sharded(WHOLE, placement).to_local()
        for one in (into["w"].to_local(), into["c"].to_local()):
            assert one.a.equal(wanted.a)
            assert one.b.equal(wanted.b)
        assert into["r"].a.equal(WHOLE)


@on_ranks(2)
def test_ranks_without_rows_take_part(rank, tmp_path):
    ringstow.distributed.save({"w": sharded(WHOLE[:1], Shard(0))}, tmp_path / "c")
    assert ringstow.load(tmp_path / "c")["w"].b.equal(WHOLE[:1] + 100)
    into = {"w": sharded(WHOLE[:1], Shard(0), blank=True)}
    ringstow.distributed.load_into(into, tmp_path / "c")
    assert into["w"].to_local().a.equal(WHOLE[: 1 - rank])


@on_ranks(2)
def test_what_can_not_be_cut_or_does_not_fit_is_named_on_all_ranks(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    local = DTensor.from_local(scaled(), mesh, [Shard(0)], run_check=False)
    _, text = raised(lambda: ringstow.distributed.save({"m": {"w": local}}, tmp_path / "c"))
    assert "m['w'] is a DTensor of a tensor_list.Scaled" in text
    assert "'scale'" in text
    assert ".full_tensor()" in text
    assert not (tmp_path / "c" / "manifest.json").exists()
    whole = DTensor.from_local(scaled(), mesh, [Replicate()], run_check=False)
    ringstow.distributed.save({"w": whole}, tmp_path / "r")  # each rank has all of it
    assert type(ringstow.load(tmp_path / "r")["w"]) is Scaled
    ringstow.distributed.save({"w": sharded(WHOLE, Shard(0))}, tmp_path / "c")
    plain = DTensor.from_local(WHOLE[:4], mesh, [Shard(0)], run_check=False)
    wrong = [
        ({"w": whole}, "a DTensor of a tensor_list.Scaled"),
        ({"w": plain}, "a sharded tensor here and a torch.testing._internal.two_tensor.TwoTensor"),
        ({"w": sharded(WHOLE[:6], Shard(0))}, "shape [6, 5] here and shape [7, 5]"),
    ]
    for state, said in wrong:
        name, text = raised(
            lambda state=state: ringstow.distributed.load_into(state, tmp_path / "c")
        )
        assert name == "KeyMismatchError"
        assert said in text


@on_ranks(2)
def test_dcp_saves_shards_of_wrappers_and_loads_them_in_another_layout(rank, tmp_path):
    state = {"m": {"w": sharded(WHOLE, Shard(0)), "c": sharded(WHOLE, Shard(1))}}
    state["r"] = sharded(WHOLE, Replicate())
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=ringstow.dcp.StorageWriter())
    whole = ringstow.load(tmp_path / "c")
    for one in (whole["m"]["w"], whole["m"]["c"], whole["r"]):
        assert type(one) is TwoTensor
        assert one.a.equal(WHOLE)
        assert one.b.equal(WHOLE + 100)
    for placement in (Shard(0), Shard(1), Replicate()):
        into = {"m": {name: sharded(WHOLE, placement, blank=True) for name in ("w", "c")}}
        into["r"] = sharded(WHOLE, placement, blank=True)
        held = into["m"]["w"]
        reader, planner = ringstow.dcp.StorageReader(), ringstow.dcp.LoadPlanner()
        dcp.load(into, checkpoint_id=tmp_path / "c", storage_reader=reader, planner=planner)
        assert into["m"]["w"] is held
        wanted = sharded(WHOLE, placement).to_local()
        for one in (into["m"]["w"], into["m"]["c"], into["r"]):
            assert one.to_local().a.equal(wanted.a)
            assert one.to_local().b.equal(wanted.b)
    writer = ringstow.dcp.StorageWriter()
    dcp.async_save(state, checkpoint_id=tmp_path / "a", storage_writer=writer).result()
    assert not ringstow.diff(tmp_path / "c", tmp_path / "a").differing
    into = {"m": {name: sharded(WHOLE[:6], Shard(0)) for name in ("w", "c")}}
    into["r"] = sharded(WHOLE[:6], Shard(0))
    reader = ringstow.dcp.StorageReader()
    _, text = raised(lambda: dcp.load(into, checkpoint_id=tmp_path / "c", storage_reader=reader))
    assert "m.w is shape [6, 5] here and [7, 5]" in text


@on_ranks(2)
def test_dcp_names_wrappers_that_it_can_not_cut(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": DTensor.from_local(scaled(), mesh, [Shard(0)], run_check=False)}
    writer = ringstow.dcp.StorageWriter()
    _, text = raised(lambda: dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer))
    assert "w is a DTensor of a tensor_list.Scaled" in text
    assert "'scale'" in text
    assert not (tmp_path / "c" / "manifest.json").exists()
