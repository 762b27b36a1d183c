"""Several ranks under what changes how torch makes tensors: a default device, dispatch modes."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from layouts import HIDDEN, differences, whole
from node_runs import manager_on, root_on
from ranks import on_ranks
from support import assert_same
from test_distributed import state_of
from torch._subclasses.fake_tensor import FakeTensorMode

import ringstow
import ringstow.dcp
from ringstow import distributed


@contextlib.contextmanager
def under(mode):
    if mode == "fake":
        with FakeTensorMode():
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def saved_by_nodes(rank, root, mode):
    model, optimizer, state = state_of("fsdp2", 1, 2, HIDDEN)
    with manager_on(rank, root, replicas=2) as manager, under(mode):
        manager.save(1, state)
        manager.wait_promoted()
    return whole(model, optimizer)


def restored_by_nodes(rank, root, mode):
    model, optimizer, state = state_of("fsdp2", 9, 2, HIDDEN)
    with manager_on(rank, root, replicas=2) as manager, under(mode):
        manager.restore(into=state)
    return whole(model, optimizer)


@pytest.mark.parametrize("mode", ["default device", "fake"])
def test_nodes_copy_and_fetch_real_tensors(ranks, tmp_path, mode):
    saved = ranks(2).run(saved_by_nodes, tmp_path, mode)[0]
    shutil.rmtree(root_on(tmp_path, 0))
    restored = ranks(2).run(restored_by_nodes, tmp_path, mode)[0]
    assert differences(saved, restored) == []


@pytest.mark.parametrize("mode", ["default device", "fake"])
@on_ranks(2)
def test_ranks_save_load_and_export_real_tensors(rank, tmp_path, mode):
    model, optimizer, state = state_of("fsdp2", 1, 2, HIDDEN)
    before = whole(model, optimizer)
    with under(mode):
        distributed.save(state, tmp_path / "plain")
        distributed.save_async(state, tmp_path / "background").result()
    for name in ("plain", "background"):
        model, optimizer, state = state_of("fsdp2", 9, 2, HIDDEN)
        with under(mode):
            distributed.load_into(state, tmp_path / name)
        assert differences(before, whole(model, optimizer)) == []
    with under(mode):
        loaded = distributed.load(tmp_path / "plain", prefix="model")["model"]
        ringstow.dcp.export_hf(state["model"], tmp_path / "hf")
    assert_same(ringstow.load(tmp_path / "hf"), dict(loaded))
