"""Conversions to and from torch.save, torch.distributed.checkpoint and Hugging Face safetensors."""

import collections
import decimal
import os

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import mild_load, plain, read_hf, saved, trained, varied
from support import assert_same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ringstow.dcp
from ringstow._foreign._lazy_tensors import ReadAhead
from ringstow.convert import (
    convert,
    dcp_to_ringstow,
    hf_to_ringstow,
    parse_size,
    ringstow_to_dcp,
    ringstow_to_hf,
    ringstow_to_torch,
    torch_to_ringstow,
)
from ringstow.convert._check import Comparison

pytestmark = pytest.mark.torch_seam


# To and from torch.save


@pytest.mark.parametrize("state", [trained(), varied()], ids=["trained", "varied"])
def test_a_torch_file_comes_back_equal_over_ringstow(at, state):
    report = torch_to_ringstow(saved(state, at / "a.pt"), at / "ckpt")
    assert report.verified
    assert report.save.path == str(at / "ckpt")
    assert_same(ringstow.load(at / "ckpt"), plain(state))
    ringstow_to_torch(at / "ckpt", at / "b.pt")
    assert_same(plain(mild_load(at / "b.pt")), plain(state))


def test_tied_tensors_and_arrays_stay_tied(at):
    array = np.arange(5.0)
    torch_to_ringstow(saved(varied() | {"a": array, "b": [array]}, at / "a.pt"), at / "ckpt")
    ringstow_to_torch(at / "ckpt", at / "b.pt")
    for state in (ringstow.load(at / "ckpt"), mild_load(at / "b.pt")):
        one, other = state["tied"]
        assert one.data_ptr() == other.data_ptr()
        assert np.shares_memory(state["a"], state["b"][0])


def test_names_that_look_alike_with_a_dtype_are_two_tensors(at):
    """Regression: the second became the first."""
    state = {"a": np.zeros(3, "<f4"), "a<f4": torch.ones(3)}
    ringstow.save(state, at / "ckpt")
    ringstow_to_torch(at / "ckpt", at / "a.pt")
    assert_same(mild_load(at / "a.pt"), state)


def test_values_that_are_not_numbers_are_equal_to_themselves(at):
    nan = float("nan")
    state = {
        "decimal": decimal.Decimal("NaN"),
        "complex": complex(0, nan),
        nan: {"nested": nan, (nan, 1): {nan}},
    }
    ringstow.save(state, at / "ckpt")
    assert convert(at / "ckpt", at / "a.pt", allow_pickle=True).verified
    assert convert(at / "a.pt", at / "again", allow_pickle=True).verified


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        ({1.0: 2}, {2.0: 2}),
        ({1: 2}, {1: 2, 3: 4}),
        ({1: 2, 3: 4}, {1: 2}),
        ({float("nan"): 1}, {float("nan"): 2}),
        ({1, 2}, {1, 3}),
        ({1: 2}, {True: 2}),
        ({0: 2}, {0.0: 2}),
        ({(1, 2): 3}, {(True, 2): 3}),
        ({0.0: 1}, {-0.0: 1}),
        ({1, 2}, {True, 2}),
        (collections.Counter({1: 2}), collections.Counter({True: 2})),
    ],
)
def test_comparison_finds_values_that_differ(one, other):
    compare = Comparison("from", "to", lambda _: None)
    with pytest.raises(ringstow.CorruptCheckpointError, match="Nothing was removed"):
        compare.check({"a": one}, {"a": other})


def test_old_torch_format_is_loaded_whole_with_a_warning(at):
    torch.save(trained(), at / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="loaded into memory at once"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    assert_same(ringstow.load(at / "ckpt"), plain(trained()))


# To and from torch.distributed.checkpoint


def test_stock_dcp_directory_converts_both_ways(at):
    state = trained()
    dcp.save(dict(state), checkpoint_id=at / "stock", no_dist=True)
    dcp_to_ringstow(at / "stock", at / "ckpt")
    torch_to_ringstow(saved(state, at / "a.pt"), at / "direct")
    loaded, direct = ringstow.load(at / "ckpt"), ringstow.load(at / "direct")
    assert_same(dict(loaded["model"]), dict(direct["model"]))
    assert loaded["step"] == 7
    assert loaded["optimizer"]["param_groups"] == direct["optimizer"]["param_groups"]

    ringstow_to_dcp(at / "direct", at / "ours")
    into = {key: value for key, value in trained().items() if key != "rng"}
    for tensor in into["model"].values():
        tensor.zero_()
    into["step"] = 0
    dcp.load(into, checkpoint_id=at / "ours", no_dist=True)
    assert_same(dict(into["model"]), dict(state["model"]))
    assert into["step"] == 7


def test_name_of_a_torch_file_asks_for_one_from_every_other_kind(at):
    source = saved({"w": torch.arange(6.0)}, at / "a.pt")
    assert convert(source, at / "step.ckpt").target_kind == "ringstow"
    for kind in ("dcp", "hf"):
        convert(at / "step.ckpt", at / kind, target=kind)
        assert convert(at / kind, at / f"{kind}.pt").target_kind == "torch"
        assert torch.equal(torch.load(at / f"{kind}.pt")["w"], torch.arange(6.0))


def test_results_equal_those_of_torchs_converters(at):
    saved(varied(), at / "a.pt")
    torch_save_to_dcp(at / "a.pt", at / "theirs")
    torch_to_ringstow(at / "a.pt", at / "ckpt")
    ringstow_to_dcp(at / "ckpt", at / "ours")
    for name in ("theirs", "ours"):
        dcp_to_torch_save(at / name, at / f"{name}.pt")
        dcp_to_ringstow(at / name, at / f"{name}.ckpt")
    theirs, ours = (torch.load(at / f"{n}.pt", weights_only=False) for n in ("theirs", "ours"))
    assert_same(plain(ours), plain(theirs))
    # ringstow reads both, with torch's results.
    assert_same(ringstow.load(at / "ours.ckpt"), plain(theirs))
    assert_same(ringstow.load(at / "theirs.ckpt"), plain(theirs))


RANK = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
rows = torch.arange(70.0).reshape(7, 10)
state = {
    "rows": distribute_tensor(rows, mesh, [Shard(0)]),
    "columns": distribute_tensor(rows.clone(), mesh, [Shard(1)]),
    "step": 3,
}
dcp.save(state, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the group and abort a normal exit
"""


def test_shards_of_two_ranks_are_assembled(at):
    for done in forked.on_ranks(2, RANK, at / "stock"):
        assert done.returncode == 0, done.stderr
    assert len(list((at / "stock").glob("*.distcp"))) == 2
    dcp_to_ringstow(at / "stock", at / "ckpt")
    rows = torch.arange(70.0).reshape(7, 10)
    assert_same(ringstow.load(at / "ckpt"), {"rows": rows, "columns": rows, "step": 3})


def test_what_dcp_drops_is_reported_and_keys_that_it_cannot_tell_apart_are_refused(at):
    ringstow.save({"a": {"b": 1}, "a.b": torch.ones(1)}, at / "alike")
    with pytest.raises(ringstow.InvalidStateError, match="a.b"):
        ringstow_to_dcp(at / "alike", at / "dcp")
    assert not (at / "dcp").exists()
    ringstow.save({"a": torch.ones(1), "b": {"c": {}}}, at / "ckpt")
    assert ringstow_to_dcp(at / "ckpt", at / "dcp").left_out == ("b.c",)


# To and from Hugging Face


def test_model_under_a_prefix_becomes_one_file(at):
    state = trained()
    ringstow.save(state, at / "ckpt")
    report = ringstow_to_hf(at / "ckpt", at / "hf", prefix="model.")
    assert os.listdir(at / "hf") == ["model.safetensors"]
    assert report.left_out == ()
    model = read_hf(at / "hf")
    assert_same({name: model.pop(name) for name in state["model"]}, dict(state["model"]))
    assert not model


def test_a_large_model_is_split_and_cast_and_comes_back(at):
    tensors = {f"l{i}.w": torch.randn(64, 64) for i in range(10)}
    ids = torch.arange(9)
    ringstow.save({**tensors, "ids": ids, "step": 3}, at / "ckpt")
    report = ringstow_to_hf(at / "ckpt", at / "hf", dtype="bfloat16", max_shard_size="30KB")
    assert report.left_out == ("step",)
    shards = sorted(at.glob("hf/*.safetensors"))
    assert len(shards) == report.save.files > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(shard.stat().st_size <= 30_000 for shard in shards)
    expected = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    model = read_hf(at / "hf")
    assert_same({name: model[name] for name in expected}, expected)
    assert_same(model["ids"], ids)
    hf_to_ringstow(at / "hf", at / "back")
    back = ringstow.load(at / "back")
    assert_same({name: back[name] for name in model}, model)


def test_safetensors_of_torchs_writer_are_read(at):
    state = {"w": torch.randn(6, 4), "b": torch.arange(3)}
    writer = dcp.HuggingFaceStorageWriter(path=str(at / "hf"))
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    hf_to_ringstow(at / "hf", at / "ckpt")
    assert_same(dict(sorted(ringstow.load(at / "ckpt").items())), dict(sorted(state.items())))


def test_ringstow_dcp_checkpoint_is_converted(at):
    """It is of kind ringstow, despite the .metadata beside its manifest."""
    state = {"model": {"w": torch.randn(6, 4)}, "step": 3, "lr": [0.1, 0.2]}
    writer = ringstow.dcp.StorageWriter()
    dcp.save(state, checkpoint_id=at / "ckpt", storage_writer=writer, no_dist=True)
    assert (at / "ckpt" / ".metadata").exists()
    ringstow_to_hf(at / "ckpt", at / "hf", prefix="model.")
    assert_same(read_hf(at / "hf"), {"w": state["model"]["w"]})
    convert(at / "ckpt", at / "a.pt")
    assert_same(mild_load(at / "a.pt"), state)


def test_tied_tensors_are_written_once_and_named(at):
    weight = torch.randn(4, 4)
    ringstow.save({"embed": weight, "head": weight}, at / "ckpt")
    report = ringstow_to_hf(at / "ckpt", at / "hf")
    assert report.tied == (("head", "embed"),)
    assert read_hf(at / "hf").keys() == {"embed"}


def test_unknown_prefix_error_lists_the_names(at):
    ringstow.save({"model": {"w": torch.ones(1)}}, at / "ckpt")
    with pytest.raises(ringstow.KeyMismatchError, match="model"):
        ringstow_to_hf(at / "ckpt", at / "hf", prefix="net.")
    assert not (at / "hf").exists()


def test_dtype_unknown_to_safetensors_is_refused_by_name(at):
    ringstow.save({"spectrum": torch.ones(2, dtype=torch.complex128)}, at / "ckpt")
    with pytest.raises(ringstow.UnsupportedError, match="spectrum"):
        ringstow_to_hf(at / "ckpt", at / "hf")
    assert not (at / "hf").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kB", 1500), (7, 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "0", 0])
def test_invalid_size_is_refused(text):
    with pytest.raises(ringstow.InvalidStateError):
        parse_size(text)


def test_small_tensors_are_read_in_batches_once(at):
    state = {f"w{i}": torch.randn(100 + i % 3) for i in range(500)}
    ringstow.save(state, at / "ckpt")
    checkpoint = ringstow._native.Checkpoint(str(at / "ckpt"), ringstow.Config().to_json())
    asked = []

    class Counted:
        tensors = checkpoint.tensors

        def load(self, names):
            asked.extend(names)
            return checkpoint.load(names)

    ahead = ReadAhead(Counted())
    for name, tensor in state.items():
        assert bytes(ahead.take(name)) == tensor.numpy().tobytes()
    assert sorted(asked) == sorted(state)
