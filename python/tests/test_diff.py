"""`ringstow.diff`: the differences between two checkpoints."""

import collections
import datetime
import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringstow
import ringstow.dcp
from ringstow.convert import convert

CONFIG = ringstow.Config(block_bytes=4096, pool_bytes=64 << 10)


def state_of():
    return {
        "model": {"w": torch.arange(5000.0), "b": torch.ones(7, dtype=torch.bfloat16)},
        "array": np.arange(10),
        "tags": {"x"},
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "rng": torch.tensor([1, 2, 3]),
    }


@pytest.fixture
def saved(tmp_path):
    def save(name, state, **options):
        ringstow.save(state, tmp_path / name, config=options.pop("config", CONFIG), **options)
        return tmp_path / name

    return save


def test_equal_checkpoints_are_equal_in_any_layout(saved):
    a = saved("a", state_of(), step=1)
    b = saved("b", state_of(), step=2)
    report = ringstow.diff(a, b)
    assert report.is_equal
    with pytest.raises(TypeError, match="is_equal"):
        bool(report)
    assert report.read_bytes == 0
    assert (report.a, report.b) == (str(a), str(b))
    other = saved("c", state_of(), config=ringstow.Config(shard_bytes=8192))
    report = ringstow.diff(a, other, values=True)
    assert report.is_equal
    assert report.equal_tensors == 4


def test_step_and_metrics_of_both_are_reported_and_are_no_difference(saved):
    a = saved("a", state_of(), step=1, metrics={"loss": 0.5})
    b = saved("b", state_of(), step=2, metrics={"loss": float("inf")})
    report = ringstow.diff(a, b)
    assert report.is_equal
    assert (report.step_a, report.step_b) == (1, 2)
    assert (report.metrics_a, report.metrics_b) == ({"loss": 0.5}, {"loss": float("inf")})
    plain = ringstow.diff(saved("c", state_of()), b)
    assert (plain.step_a, plain.metrics_a) == (None, {})


def test_differences_are_named_and_measured(saved):
    a = saved("a", state_of())
    state = state_of()
    state["model"]["w"][[3, 4999]] += torch.tensor([0.5, -2.0])
    state["model"]["b"] = torch.ones(8, dtype=torch.bfloat16)
    state["lr"] = 0.2
    state["betas"] = [0.9, 0.99]
    state["rng"] = state["rng"].to(torch.int32)
    del state["array"]
    state["new"] = torch.zeros(2)
    b = saved("b", state)
    report = ringstow.diff(a, b, values=True)
    assert not report.is_equal
    assert (report.only_in_a, report.only_in_b) == (("array",), ("new",))
    (change, dtype) = report.changed
    assert (change.name, change.shape_a, change.shape_b) == ("model.b", (7,), (8,))
    assert (dtype.name, dtype.dtype_a, dtype.dtype_b) == ("rng", "I64", "I32")
    (tensor,) = report.differing
    assert tensor.name == "model.w"
    assert tensor.elements == ringstow.ElementDiff(
        differing=2, elements=5000, max_abs=2.0, not_finite=0
    )
    values = {value.name: (value.a, value.b) for value in report.values}
    assert values == {"lr": ("0.1", "0.2"), "betas": ("a tuple", "a list")}
    assert ringstow.diff(a, b).differing[0].elements is None


@pytest.mark.parametrize("leaf", [5, torch.ones(3), {"x": torch.ones(2), "y": 1}])
def test_states_that_load_differently_differ(saved, leaf):
    tied = torch.ones(4)
    pairs = [
        ({"a.b": leaf}, {"a": {"b": leaf}}),
        ({1: leaf}, {"1": leaf}),
        ({"o": collections.OrderedDict(a=leaf)}, {"o": {"a": leaf}}),
        ({"a": leaf, "z": 1}, {"z": 1, "a": leaf}),
        ({"a": tied, "b": tied}, {"a": tied, "b": tied.clone()}),
    ]
    for number, (one, other) in enumerate(pairs):
        a, b = saved(f"a{number}", one), saved(f"b{number}", other)
        report = ringstow.diff(a, b)
        assert report.values, pairs[number]
        assert not any("$" in (value.a or "") + (value.b or "") for value in report.values)
        assert ringstow.diff(a, a).is_equal


def test_objects_of_dcp_are_values(tmp_path):
    def save(name, **objects):
        state = {"w": torch.arange(5000.0), "opt": {"groups": [{"lr": 0.1}]}, **objects}
        writer = ringstow.dcp.StorageWriter(tmp_path / name)
        dcp.save(state, storage_writer=writer)
        return tmp_path / name

    a = save("a", note="short", other={1, 2})
    b = save("b", note="a longer text", new={3})
    report = ringstow.diff(a, b, values=True)
    assert (report.only_in_a, report.only_in_b) == ((), ())
    assert (report.changed, report.differing, report.equal_tensors) == ((), (), 1)
    values = {value.name: (value.a, value.b) for value in report.values}
    assert set(values) == {"note", "other", "new"}
    assert re.fullmatch(r'an object of \d+ bytes: "short"', values["note"][0])
    assert re.fullmatch(r'another of \d+ bytes: "a longer text"', values["note"][1])
    assert values["other"][0].endswith(" bytes: set")
    assert (values["other"][1], values["new"][0]) == (None, None)
    assert ringstow.diff(a, a).is_equal


def test_object_of_dcp_beside_a_converted_value_says_what_it_is(tmp_path):
    """Regression: it was "an object", whatever it held."""
    state = {"step": 7, "lr": 0.5, "name": "run", "milestones": (1, 2), "options": {"size": [1]}}
    dcp.save({"opt": [state]}, checkpoint_id=tmp_path / "stock", no_dist=True)
    convert(tmp_path / "stock", tmp_path / "converted")
    ours, since = ringstow.dcp.StorageWriter(tmp_path / "ours"), datetime.timedelta(days=2)
    saved = {"opt": [{**state, "since": since}], "last": since}
    dcp.save(saved, storage_writer=ours, no_dist=True)
    values = {v.name: v.a for v in ringstow.diff(tmp_path / "ours", tmp_path / "converted").values}
    assert all(text.startswith("an object of ") for text in values.values()), values
    since = '{"$value":"datetime.timedelta","args":[2,0,0]}'
    assert {name: text.partition(" bytes: ")[2] for name, text in values.items()} == {
        "opt.0.step": "7",
        "opt.0.lr": "0.5",
        "opt.0.name": '"run"',
        "opt.0.milestones": "a tuple",
        "opt.0.options.size": "a list",
        "opt.0.since": since,
        "last": since,
    }


def test_path_without_a_checkpoint_raises(saved, tmp_path):
    a = saved("a", state_of())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ringstow.diff(a, tmp_path / "nowhere")
    with pytest.raises(ringstow.IncompleteCheckpointError):
        ringstow.diff(a, tmp_path)
    with pytest.raises(ringstow.NoCheckpointError):
        ringstow.diff(a, None)
