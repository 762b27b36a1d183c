"""Conversions that are refused, fail or are interrupted, and their cleaning up."""

import collections
import errno
import itertools
import os
import resource
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import metadata_of, saved
from support import assert_same, flip, litter, raising

import ringstow
from ringstow import _native
from ringstow import convert as conversions
from ringstow._foreign import _lazy_tensors
from ringstow.convert import (
    _replace,
    _torch_files,
    convert,
    dcp_to_ringstow,
    ringstow_to_hf,
    torch_to_ringstow,
)

# Refusals


def test_metadata_that_leads_out_of_its_directory_is_refused(at):
    dcp.save({"a": torch.ones(1)}, checkpoint_id=at / "dcp", no_dist=True)
    with metadata_of(at / "dcp") as metadata:
        for place in metadata.storage_data.values():
            place.relative_path = "../elsewhere"
    with pytest.raises(ringstow.FormatError, match="elsewhere"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")


@pytest.mark.parametrize("steps", [("a", 1 << 40), ("a", 3, 1 << 33, "b"), "a", ("a", *"b" * 999)])
def test_planner_data_of_endless_lists_is_refused(at, steps):
    dcp.save({"a": torch.ones(1)}, checkpoint_id=at / "dcp", no_dist=True)
    with metadata_of(at / "dcp") as metadata:
        metadata.planner_data = {"a": steps}
    with pytest.raises(ringstow.FormatError, match="metadata"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")
    assert sorted(os.listdir(at)) == ["dcp"]


def test_pickled_values_are_converted_when_allowed(at):
    state = {"a": torch.ones(1), "s": collections.Counter({(1, 2): 3})}
    saved(state, at / "a.pt")
    with pytest.raises(ringstow.InvalidStateError, match="s"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    torch_to_ringstow(at / "a.pt", at / "ckpt", allow_pickle=True)
    assert_same(ringstow.load(at / "ckpt", allow_pickle=True), state)


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "ringstow"])
def test_path_as_both_source_and_target_is_refused(at, kind):
    ringstow.save({"a": torch.ones(1)}, at / "ckpt")
    os.symlink(at / "ckpt", at / "link")
    with pytest.raises(ringstow.InvalidStateError, match="both"):
        convert(at / "ckpt", at / "link", target=kind)


def test_undetectable_kind_is_reported(at):
    (at / "empty").mkdir()
    with pytest.raises(ringstow.InvalidStateError, match=r"manifest\.json.*\.metadata"):
        convert(at / "empty", at / "x")
    with pytest.raises(FileNotFoundError):
        convert(at / "nothing", at / "x")
    ringstow.save({"a": torch.ones(1)}, at / "step-7" / "rank00000")
    with pytest.raises(ringstow.InvalidStateError, match="use_collectives=False"):
        convert(at / "step-7", at / "x")
    ringstow.save({"a": torch.ones(1)}, at / "ckpt")
    with pytest.raises(ringstow.InvalidStateError, match="--to"):
        convert(at / "ckpt", at / "somewhere")


# Failures


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_damaged_source_fails_the_conversion(at, kind):
    ringstow.save({f"w{i}": torch.randn(50_000) for i in range(8)}, at / "ckpt")
    (shard,) = (at / "ckpt").glob("*.safetensors")
    flip(shard, shard.stat().st_size - 9)
    with pytest.raises(ringstow.CorruptCheckpointError) as caught:
        convert(at / "ckpt", at / "to", target=kind)
    assert caught.value.file == str(shard)
    assert sorted(os.listdir(at)) == ["ckpt"]


def test_corrupted_target_is_detected(at, monkeypatch):
    ringstow.save({"a": {"w": torch.zeros(1000)}}, at / "ckpt")
    write = conversions._targets.to_hf

    def write_and_damage(*args):
        written = write(*args)
        file = at / "hf" / "model.safetensors"
        flip(file, file.stat().st_size - 1)
        return written

    monkeypatch.setitem(conversions._targets.WRITERS, "hf", write_and_damage)
    with pytest.raises(ringstow.CorruptCheckpointError, match=r"a\.w"):
        ringstow_to_hf(at / "ckpt", at / "hf")
    assert (at / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "ringstow"])
def test_a_full_disk_is_an_error_and_leaves_nothing(at, kind):
    state = {f"w{i}": torch.randn(50_000) for i in range(20)}
    source = at / "a.pt"
    saved(state, source)
    if kind != "ringstow":
        source = at / "ckpt"
        torch_to_ringstow(at / "a.pt", source)
    before = sorted(os.listdir(at))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError, match="unfinished") as caught:
            convert(source, at / "unfinished", target=kind)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(at)) == before


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_conversion_whose_names_cannot_be_made_durable_stays_and_says_so(at, kind, monkeypatch):
    """Regression: the error of a new dcp directory was any failed conversion's."""
    ringstow.save({"a": torch.arange(5.0)}, at / "ckpt")
    sync = _native.sync_dir

    def fail(directory):
        if directory == str(at):
            raise OSError(errno.EIO, "input/output error", directory)
        sync(directory)

    monkeypatch.setattr(_replace._native, "sync_dir", fail)
    with pytest.raises(ringstow.NotDurableError, match="to is written and complete") as caught:
        convert(at / "ckpt", at / "to", target=kind)
    assert (caught.value.path, caught.value.errno) == (str(at / "to"), errno.EIO)
    monkeypatch.undo()
    convert(at / "to", at / "back", source=kind, target="ringstow")
    assert_same(ringstow.load(at / "back"), {"a": torch.arange(5.0)})


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_conversion_whose_file_cannot_be_synced_leaves_nothing(at, kind, monkeypatch):
    ringstow.save({"a": torch.arange(5.0)}, at / "ckpt")
    before = sorted(os.listdir(at))
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EIO, "input/output error")))
    for overwrite in (False, True):
        with pytest.raises(OSError, match="input/output error") as caught:
            convert(at / "ckpt", at / "to", target=kind, overwrite=overwrite)
        name = caught.value.filename
        assert name == str(at / "to" / "__0_convert.distcp" if kind == "dcp" else at / "to")
        assert sorted(os.listdir(at)) == before
        if not overwrite:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda _: None)
                convert(at / "ckpt", at / "to", target=kind)
            before = sorted(os.listdir(at))


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "ringstow"])
def test_ctrl_c_leaves_nothing(at, kind, monkeypatch):
    source = at / "ckpt"
    ringstow.save({f"w{i}": torch.randn(50_000) for i in range(20)}, source)
    before = sorted(os.listdir(at))

    interrupted = threading.Event()
    load = _lazy_tensors._build.Builder.make

    def late_load(*args):
        assert interrupted.wait(60)
        return load(*args)

    monkeypatch.setattr(_lazy_tensors._build.Builder, "make", late_load)

    def interrupt(phase, done, total):
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, at / "to", target=kind, progress=interrupt)
    assert sorted(os.listdir(at)) == before
    assert litter(at / "to") == []


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("call", [1, 2, 9])
def test_exit_by_a_signal_handler_while_torch_writes_is_raised(at, kind, call, monkeypatch):
    """Regression: torch replaced it by an error about its offsets."""
    ringstow.save({f"w{i}": torch.randn(50) for i in range(9)}, at / "ckpt")
    write, calls = _torch_files._Sink.write, itertools.count(1)

    def interrupted(self, data):
        if next(calls) == call:  # Python calls a handler when a function begins
            sys.exit(3)
        return write(self, data)

    monkeypatch.setattr(_torch_files._Sink, "write", interrupted)
    with pytest.raises(SystemExit):
        convert(at / "ckpt", at / "to", target=kind)
    assert os.listdir(at) == ["ckpt"]


def test_name_reserved_by_safetensors_is_refused(tmp_path):
    torch.save({"__metadata__": torch.ones(2), "a": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(ringstow.UnsupportedError, match="__metadata__"):
        convert(tmp_path / "x.pt", tmp_path / "hf", target="hf", verify=False)
    assert not (tmp_path / "hf" / "model.safetensors").exists()
