"""Objects: opaque bytes in a checkpoint, in which the DCP writer stores values."""

import io
import json

import forked
import pytest
import torch
from converted import Evil, mild_load
from support import assert_same

import ringstow
from ringstow.convert import dcp_to_ringstow, ringstow_to_dcp, ringstow_to_torch

pytestmark = pytest.mark.torch_seam


def with_objects(path, objects):
    """Save a checkpoint on one rank, with objects as values and a tensor ``w``."""
    weight = torch.arange(4.0)
    session = ringstow._native.Session(str(path), 1, ringstow.Config().to_json())
    items = [("w", ("F32", (4,), None, weight.data_ptr(), 16, weight), None, False)]
    blobs = {}
    for name, value in objects.items():
        blob = io.BytesIO()
        torch.save(value, blob)
        blobs[name] = torch.frombuffer(bytearray(blob.getvalue()), dtype=torch.uint8)
        size = blobs[name].numel()
        memory = ("U8", (size,), None, blobs[name].data_ptr(), size, blobs[name])
        items.append((name, memory, None, True))
    job = ringstow._native.start_write(items, str(path), 0, ringstow.Config().to_json())
    job.wait()
    job.result()
    leaves = {name: {"$object": name} for name in objects}
    tree = json.dumps({"w": {"$tensor": "w"}, "values": leaves})
    session.commit(ringstow._native.Receipts([job.receipt()]), tree, ["w", *objects])
    return path


def test_objects_load_as_their_values(at):
    objects = {"step": 7, "config": {"lr": [1e-3, (1, 2)], "t": torch.ones(2)}}
    path = with_objects(at / "ckpt", objects)
    whole = ringstow.load(path)
    assert_same(whole, {"w": torch.arange(4.0), "values": objects})
    assert ringstow.load(path, keys=["values.step"]) == {"values": {"step": 7}}
    assert_same(ringstow.load(path, prefix="w"), {"w": torch.arange(4.0)})
    state = {"w": torch.zeros(4), "values": {"step": 0, "config": {"lr": None}}}
    ringstow.load_into(state, path)
    assert_same(state, whole)


def test_object_beyond_plain_values_needs_allow_pickle(at):
    path = with_objects(at / "ckpt", {"evil": Evil(at / "mark"), "step": 7})
    with pytest.raises(ringstow.UnsupportedError, match="allow_pickle"):
        ringstow.load(path)
    assert not (at / "mark").exists()
    assert ringstow.load(path, keys=["values.step"]) == {"values": {"step": 7}}
    ringstow.load(path, allow_pickle=True)
    assert (at / "mark").exists()


def test_objects_are_converted_as_values(at):
    objects = {"step": 7, "config": {"lr": [1e-3]}}
    with_objects(at / "ckpt", objects)
    ringstow_to_torch(at / "ckpt", at / "a.pt")
    assert_same(mild_load(at / "a.pt"), {"w": torch.arange(4.0), "values": objects})
    ringstow_to_dcp(at / "ckpt", at / "dcp")
    dcp_to_ringstow(at / "dcp", at / "back")
    assert_same(ringstow.load(at / "back"), {"w": torch.arange(4.0), "values": objects})


def test_the_program_shows_objects(at):
    with_objects(at / "ckpt", {"step": 7})
    assert "step: object step" in forked.ringstow("show", at / "ckpt", check=True).stdout
