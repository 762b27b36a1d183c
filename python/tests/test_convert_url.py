"""Conversions of checkpoints in object stores; their targets are directories."""

import forked
import pytest
import torch
from safetensors.torch import load_file
from support import assert_same
from test_promote import shards_of

import ringstow
from ringstow.convert import convert


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {"model": {"a": torch.randn(3_000_000), "b": torch.arange(7)}, "step": 5}


@pytest.fixture
def url(state, bucket, tmp_path):
    ringstow.save(state, tmp_path / "saved", step=5)
    ringstow.promote(tmp_path / "saved", f"{bucket.url}/run/step-5")
    return f"{bucket.url}/run/step-5"


def test_checkpoint_converts_by_its_url(url, state, tmp_path):
    report = convert(url, tmp_path / "model.pt")
    assert (report.source, report.source_kind, report.verified) == (url, "ringstow", True)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), state)
    convert(url, tmp_path / "dcp", target="dcp")
    convert(tmp_path / "dcp", tmp_path / "back")
    assert_same(ringstow.load(tmp_path / "back"), state)
    convert(url, tmp_path / "hf", target="hf", prefix="model.")
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), state["model"])


def test_program_converts_by_url(url, state, tmp_path):
    forked.ringstow("convert", url, tmp_path / "model.pt", check=True)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), state)
    done = forked.ringstow("convert", tmp_path / "model.pt", url)
    assert done.returncode == 2
    assert f"`ringstow promote DIR --to {url}`" in done.stderr


def test_damage_in_the_store_fails_the_conversion(url, bucket, tmp_path):
    [shard] = shards_of(bucket)
    bucket.flip(shard, 5_000_000)
    with pytest.raises(ringstow.CorruptCheckpointError, match="s3://"):
        convert(url, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_other_kinds_and_url_targets_are_refused(bucket, tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(ringstow.InvalidStateError, match="`ringstow promote DIR --to s3://"):
        convert(tmp_path / "x.pt", f"{bucket.url}/x")
    with pytest.raises(ringstow.InvalidStateError, match="only ringstow checkpoints"):
        convert(f"{bucket.url}/x.pt", tmp_path / "y", source="torch")
    with pytest.raises(ringstow.NoCheckpointError, match="s3://"):
        convert(f"{bucket.url}/nothing", tmp_path / "x.pt", overwrite=True)
    assert (tmp_path / "x.pt").exists()
