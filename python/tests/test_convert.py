"""Conversions to and from torch.save, torch.distributed.checkpoint and Hugging Face safetensors."""

from __future__ import annotations

import collections
import errno
import io
import json
import os
import pickle
import resource
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from support import assert_same, litter, python
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ringstow
from ringstow import convert as conversions
from ringstow.convert import (
    _cli,
    convert,
    dcp_to_ringstow,
    hf_to_ringstow,
    parse_size,
    ringstow_to_dcp,
    ringstow_to_hf,
    ringstow_to_torch,
    torch_to_ringstow,
)
from ringstow.convert._ahead import ReadAhead

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained():
    """Returns what a trainer has after a step: a model, an optimizer, counters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "name": "naïve",
        "rng": torch.get_rng_state(),
    }


def varied():
    """Returns a state of every kind of value that both torch and ringstow keep."""
    weight = torch.randn(30, 4)
    return {
        "tied": [weight, weight],
        "view": weight.t(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).bfloat16(),
        "fp8": torch.randn(6).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "nan": torch.tensor([float("nan"), -0.0]),
        "array": np.arange(5.0),
        "number": np.float32(3),
        "odict": collections.OrderedDict(a=1),
        "tuple": (1, torch.ones(2)),
        "dtype": torch.float32,
        "size": torch.Size([2, 3]),
        3: {"nested": {}},
    }


@pytest.fixture
def at(tmp_path):
    return tmp_path


def saved(state, path):
    torch.save(state, path)
    return path


def plain(state):
    """Returns a state with dense tensors, as those that were stored."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        copy = type(state)((key, plain(value)) for key, value in state.items())
        vars(copy).update(vars(state)) if hasattr(state, "__dict__") else None
        return copy
    if type(state) in (list, tuple):
        return type(state)(map(plain, state))
    return state


def mild_load(path):
    """Loads a torch file without running any code of its."""
    with conversions._sources.plain_numpy():
        return torch.load(path, weights_only=True)


# To and from torch.save


@pytest.mark.parametrize("state", [trained(), varied()], ids=["trained", "varied"])
def test_a_torch_file_comes_back_equal_over_ringstow(at, state):
    report = torch_to_ringstow(saved(state, at / "a.pt"), at / "ckpt")
    assert report.verified
    assert report.save.path == str(at / "ckpt")
    assert_same(ringstow.load(at / "ckpt"), plain(state))
    ringstow_to_torch(at / "ckpt", at / "b.pt")
    assert_same(plain(mild_load(at / "b.pt")), plain(state))


def test_tied_tensors_stay_tied(at):
    torch_to_ringstow(saved(varied(), at / "a.pt"), at / "ckpt")
    one, other = ringstow.load(at / "ckpt")["tied"]
    assert one.data_ptr() == other.data_ptr()
    ringstow_to_torch(at / "ckpt", at / "b.pt")
    one, other = mild_load(at / "b.pt")["tied"]
    assert one.data_ptr() == other.data_ptr()


def test_a_file_of_an_old_torch_is_loaded_whole_and_says_so(at):
    torch.save(trained(), at / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="loaded into memory whole"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    assert_same(ringstow.load(at / "ckpt"), plain(trained()))


# To and from torch.distributed.checkpoint


def test_a_stock_dcp_directory_comes_back_equal_and_torch_reads_what_is_written(at):
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


def test_what_torchs_own_converters_write_and_read_is_the_same(at):
    state = varied()
    saved(state, at / "a.pt")
    torch_save_to_dcp(at / "a.pt", at / "theirs")
    torch_to_ringstow(at / "a.pt", at / "ckpt")
    ringstow_to_dcp(at / "ckpt", at / "ours")
    for name in ("theirs", "ours"):
        dcp_to_torch_save(at / name, at / f"{name}.pt")
        dcp_to_ringstow(at / name, at / f"{name}.ckpt")
    theirs, ours = (torch.load(at / f"{n}.pt", weights_only=False) for n in ("theirs", "ours"))
    assert_same(plain(ours), plain(theirs))
    # And read by us, both are what torch makes of its own.
    assert_same(ringstow.load(at / "ours.ckpt"), plain(theirs))
    assert_same(ringstow.load(at / "theirs.ckpt"), plain(theirs))


RANK = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
rows = torch.arange(70.0).reshape(7, 10)
state = {
    "rows": distribute_tensor(rows, mesh, [Shard(0)]),
    "columns": distribute_tensor(rows.clone(), mesh, [Shard(1)]),
    "step": 3,
}
dcp.save(state, checkpoint_id=path)
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as others do
"""


def test_tensors_that_two_ranks_wrote_are_put_together(at):
    from support import python_start

    ranks = [python_start(RANK, rank, at / "store", at / "stock") for rank in (0, 1)]
    for rank in ranks:
        _, err = rank.communicate(timeout=100)
        assert rank.returncode == 0, err
    assert len(list((at / "stock").glob("*.distcp"))) == 2
    dcp_to_ringstow(at / "stock", at / "ckpt")
    rows = torch.arange(70.0).reshape(7, 10)
    assert_same(ringstow.load(at / "ckpt"), {"rows": rows, "columns": rows, "step": 3})


def test_empty_dicts_that_dcp_has_no_place_for_are_reported(at):
    ringstow.save({"a": torch.ones(1), "b": {"c": {}}}, at / "ckpt")
    assert ringstow_to_dcp(at / "ckpt", at / "dcp").left_out == ("b.c",)


def test_keys_that_dcp_cannot_tell_apart_are_refused(at):
    ringstow.save({"a": {"b": 1}, "a.b": torch.ones(1)}, at / "ckpt")
    with pytest.raises(ringstow.InvalidStateError, match="a.b"):
        ringstow_to_dcp(at / "ckpt", at / "dcp")
    assert not (at / "dcp").exists()


# To and from Hugging Face


def read_hf(path):
    """Reads a model as transformers would: by the index, or the one file."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    listed = json.loads(index.read_text())
    state = {}
    for name, shard in listed["weight_map"].items():
        with safe_open(path / shard, "pt") as file:
            state[name] = file.get_tensor(name)
    assert listed["metadata"] == {"total_size": sum(t.nbytes for t in state.values())}
    return state


def test_a_model_under_a_prefix_becomes_one_file_with_bare_names(at):
    state = trained()
    ringstow.save(state, at / "ckpt")
    report = ringstow_to_hf(at / "ckpt", at / "hf", prefix="model.")
    assert os.listdir(at / "hf") == ["model.safetensors"]
    assert report.left_out == ()
    model = read_hf(at / "hf")
    assert model.keys() == state["model"].keys()
    for name, tensor in state["model"].items():
        assert_same(model[name], tensor, name)


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


def test_what_torchs_own_writer_of_safetensors_wrote_is_read(at):
    state = {"w": torch.randn(6, 4), "b": torch.arange(3)}
    writer = dcp.HuggingFaceStorageWriter(path=str(at / "hf"))
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    hf_to_ringstow(at / "hf", at / "ckpt")
    assert_same(dict(sorted(ringstow.load(at / "ckpt").items())), dict(sorted(state.items())))


def test_what_ringstow_wrote_under_dcp_is_converted(at):
    import ringstow.dcp

    state = {"model": {"w": torch.randn(6, 4)}, "step": 3, "lr": [0.1, 0.2]}
    dcp.save(
        state, checkpoint_id=at / "ckpt", storage_writer=ringstow.dcp.StorageWriter(), no_dist=True
    )
    ringstow_to_hf(at / "ckpt", at / "hf", prefix="model.")
    assert_same(read_hf(at / "hf"), {"w": state["model"]["w"]})
    ringstow_to_torch(at / "ckpt", at / "a.pt")
    assert_same(mild_load(at / "a.pt"), state)


def test_tied_tensors_are_written_once_and_named(at):
    weight = torch.randn(4, 4)
    ringstow.save({"embed": weight, "head": weight}, at / "ckpt")
    report = ringstow_to_hf(at / "ckpt", at / "hf")
    assert report.tied == (("head", "embed"),)
    assert read_hf(at / "hf").keys() == {"embed"}


def test_a_prefix_that_nothing_has_names_what_is_there(at):
    ringstow.save({"model": {"w": torch.ones(1)}}, at / "ckpt")
    with pytest.raises(ringstow.KeyMismatchError, match="model"):
        ringstow_to_hf(at / "ckpt", at / "hf", prefix="net.")
    assert not (at / "hf").exists()


def test_a_dtype_that_safetensors_has_no_word_for_is_refused_by_name(at):
    ringstow.save({"spectrum": torch.ones(2, dtype=torch.complex128)}, at / "ckpt")
    with pytest.raises(ringstow.UnsupportedError, match="spectrum"):
        ringstow_to_hf(at / "ckpt", at / "hf")
    assert not (at / "hf").exists()


def test_model_files_that_are_there_are_never_mixed_with(at):
    ringstow.save({"w": torch.ones(2)}, at / "ckpt")
    (at / "hf").mkdir()
    (at / "hf" / "config.json").write_text("{}")
    ringstow_to_hf(at / "ckpt", at / "hf")  # other files may be there
    before = (at / "hf" / "model.safetensors").read_bytes()
    with pytest.raises(ringstow.InvalidStateError, match="model.safetensors"):
        ringstow_to_hf(at / "ckpt", at / "hf")
    assert (at / "hf" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kB", 1500), (7, 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "0", 0])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ringstow.InvalidStateError):
        parse_size(text)


# What is refused


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_an_evil_torch_file_is_refused_and_not_run(at):
    saved({"a": torch.ones(1), "evil": Evil(at / "mark")}, at / "a.pt")
    with pytest.raises(ringstow.UnsupportedError, match="allow_pickle"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    assert sorted(os.listdir(at)) == ["a.pt"]


def test_evil_metadata_is_refused_and_not_run(at):
    dcp.save({"a": torch.ones(1)}, checkpoint_id=at / "dcp", no_dist=True)
    metadata = pickle.loads((at / "dcp" / ".metadata").read_bytes())
    metadata.planner_data = Evil(at / "mark")
    (at / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ringstow.UnsupportedError, match="mkdir"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")
    assert sorted(os.listdir(at)) == ["dcp"]


def test_an_evil_value_of_a_dcp_directory_is_refused_and_not_run(at):
    dcp.save({"a": torch.ones(1), "b": Evil(at / "mark")}, checkpoint_id=at / "dcp", no_dist=True)
    with pytest.raises(ringstow.UnsupportedError, match="b"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")
    assert sorted(os.listdir(at)) == ["dcp"]


def test_metadata_that_leads_out_of_its_directory_is_refused(at):
    dcp.save({"a": torch.ones(1)}, checkpoint_id=at / "dcp", no_dist=True)
    metadata = pickle.loads((at / "dcp" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (at / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ringstow.FormatError, match="elsewhere"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")


def test_pickled_values_are_converted_when_allowed(at):
    state = {"a": torch.ones(1), "s": {1, 2}}
    saved(state, at / "a.pt")
    with pytest.raises(ringstow.InvalidStateError, match="s"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    torch_to_ringstow(at / "a.pt", at / "ckpt", allow_pickle=True)
    assert_same(ringstow.load(at / "ckpt", allow_pickle=True), state)


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "ringstow"])
def test_a_path_that_is_both_source_and_target_is_refused(at, kind):
    ringstow.save({"a": torch.ones(1)}, at / "ckpt")
    os.symlink(at / "ckpt", at / "link")
    with pytest.raises(ringstow.InvalidStateError, match="both"):
        convert(at / "ckpt", at / "link", target=kind)


def test_targets_that_hold_something_are_refused_and_stay(at):
    ringstow.save({"a": torch.ones(1)}, at / "ckpt")
    (at / "x.pt").write_text("mine")
    (at / "dir").mkdir()
    (at / "dir" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match=r"x\.pt"):
        ringstow_to_torch(at / "ckpt", at / "x.pt")
    with pytest.raises(FileExistsError, match="dir"):
        ringstow_to_dcp(at / "ckpt", at / "dir")
    assert (at / "x.pt").read_text() == "mine"
    assert os.listdir(at / "dir") == ["mine"]


def test_a_ringstow_checkpoint_is_replaced_only_by_a_whole_one(at):
    ringstow.save({"old": 1}, at / "ckpt")
    saved({"a": torch.ones(1), "s": {1}}, at / "bad.pt")
    with pytest.raises(ringstow.InvalidStateError):
        torch_to_ringstow(at / "bad.pt", at / "ckpt", allow_pickle=False)
    assert ringstow.load(at / "ckpt") == {"old": 1}
    torch_to_ringstow(saved({"new": 2}, at / "good.pt"), at / "ckpt")
    assert ringstow.load(at / "ckpt") == {"new": 2}


def test_kinds_that_cannot_be_told_are_said_to_be(at):
    (at / "empty").mkdir()
    with pytest.raises(ringstow.InvalidStateError, match=r"manifest\.json.*\.metadata"):
        convert(at / "empty", at / "x")
    with pytest.raises(FileNotFoundError):
        convert(at / "nothing", at / "x")
    ringstow.save({"a": torch.ones(1)}, at / "ckpt")
    with pytest.raises(ringstow.InvalidStateError, match="--to"):
        convert(at / "ckpt", at / "somewhere")


# What goes wrong


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


def test_a_damaged_torch_file_is_found(at):
    marker = torch.full((1000,), 1.5)
    saved({"a": marker}, at / "a.pt")
    data = (at / "a.pt").read_bytes()
    flip(at / "a.pt", data.index(marker.numpy().tobytes()) + 100)
    with pytest.raises(ringstow.CorruptCheckpointError, match="checksum"):
        torch_to_ringstow(at / "a.pt", at / "ckpt")
    assert not (at / "ckpt").exists()
    (at / "a.pt").write_bytes(data[:2000])
    # Cut short, it looks like the format of old.
    with (
        pytest.warns(UserWarning, match="no checkpoint at all"),
        pytest.raises((ringstow.CorruptCheckpointError, ringstow.UnsupportedError)),
    ):
        torch_to_ringstow(at / "a.pt", at / "ckpt")


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_damage_in_a_ringstow_checkpoint_is_what_the_conversion_fails_with(at, kind):
    ringstow.save({f"w{i}": torch.randn(50_000) for i in range(8)}, at / "ckpt")
    (shard,) = (at / "ckpt").glob("*.safetensors")
    flip(shard, shard.stat().st_size - 9)
    with pytest.raises(ringstow.CorruptCheckpointError) as caught:
        convert(at / "ckpt", at / "to", target=kind)
    assert caught.value.file == str(shard)
    assert sorted(os.listdir(at)) == ["ckpt"]


@pytest.mark.parametrize("change", ["remove", "truncate"])
def test_a_dcp_file_that_is_gone_or_cut_is_named_and_nothing_is_committed(at, change):
    state = {f"w{i}": torch.randn(50_000) for i in range(8)}
    dcp.save(state, checkpoint_id=at / "dcp", no_dist=True)
    (file,) = (at / "dcp").glob("*.distcp")
    if change == "remove":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises((FileNotFoundError, ringstow.CorruptCheckpointError), match="dcp"):
        dcp_to_ringstow(at / "dcp", at / "ckpt")
    assert not (at / "ckpt").exists()


def test_a_target_that_is_not_what_was_written_is_found(at, monkeypatch):
    ringstow.save({"a": {"w": torch.zeros(1000)}}, at / "ckpt")
    write = conversions._targets.to_hf

    def write_and_damage(*args, **options):
        written = write(*args, **options)
        file = at / "hf" / "model.safetensors"
        flip(file, file.stat().st_size - 1)
        return written

    monkeypatch.setattr(conversions._targets, "to_hf", write_and_damage)
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


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "ringstow"])
def test_ctrl_c_leaves_nothing(at, kind, monkeypatch):
    state = {f"w{i}": torch.randn(50_000) for i in range(20)}
    source = at / "ckpt"
    ringstow.save(state, source)
    before = sorted(os.listdir(at))

    interrupted = threading.Event()
    load = conversions._sources._build.Builder.value

    def late_load(*args):
        assert interrupted.wait(60)
        return load(*args)

    monkeypatch.setattr(conversions._sources._build.Builder, "value", late_load)

    def interrupt(phase, done, total):
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, at / "to", target=kind, progress=interrupt)
    assert sorted(os.listdir(at)) == before
    assert litter(at / "to") == []


def test_progress_ends_at_all_of_both_phases(at):
    said = {}
    saved({"a": torch.ones(1000), "b": torch.ones(5)}, at / "a.pt")
    torch_to_ringstow(at / "a.pt", at / "ckpt", progress=lambda p, d, t: said.update({p: (d, t)}))
    assert said["verifying"] == (4020, 4020)
    assert said["writing"][0] == said["writing"][1] > 4020


BOUNDED = """
import sys, threading
import torch
from ringstow import Config, convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) * 1024 for l in status if l.startswith("RssAnon"))

small, big, target, to = sys.argv[1:]
config = Config(pool_bytes=16 << 20, block_bytes=1 << 20)
convert.convert(small, to + ".small", target=target, config=config)  # imports, pools
before, peak, end = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not end.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
report = convert.convert(big, to, target=target, config=config)
end.set()
thread.join()
print(report.tensor_bytes, peak - before)
"""


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("torch", "ringstow"),
        ("dcp", "ringstow"),
        ("ringstow", "torch"),
        ("ringstow", "dcp"),
        ("ringstow", "hf"),
        ("hf", "ringstow"),
    ],
)
def test_memory_is_that_of_a_few_tensors(at, source, target):
    for name, count in (("small", 2), ("big", 200)):
        state = {f"w{i}": torch.randn(256, 1024) for i in range(count)}
        writers = {
            "torch": torch.save,
            "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
            "ringstow": ringstow.save,
            "hf": lambda state, path: _save_hf(state, path),
        }
        writers[source](state, at / name)
    ran = python(BOUNDED, at / "small", at / "big", target, at / "to")
    assert ran.returncode == 0, ran.stderr
    total, growth = map(int, ran.stdout.split())
    assert total == 200 << 20
    # Some 20 MB are usual; how much the allocator keeps for its threads differs from run to run.
    assert growth < total / 2


def _save_hf(state, path):
    from safetensors.torch import save_file

    os.mkdir(path)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


# The program


def program(*args):
    return python("from ringstow import _cli; _cli.main()", "convert", *args)


def test_the_program_converts_and_says_what_it_did(at):
    saved(trained(), at / "a.pt")
    ran = program(at / "a.pt", at / "ckpt")
    assert ran.returncode == 0, ran.stderr
    assert "verified bit by bit" in ran.stdout
    ran = program(at / "ckpt", at / "hf", "--to", "hf", "--prefix", "model.", "--dtype", "float16")
    assert ran.returncode == 0, ran.stderr
    assert read_hf(at / "hf")["0.weight"].dtype == torch.float16
    ran = program(at / "ckpt", at / "quiet.pt", "--quiet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_the_program_says_in_a_line_what_went_wrong(at):
    ran = program(at / "nothing", at / "x")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "nothing" in ran.stderr
    saved({"evil": Evil(at / "mark")}, at / "a.pt")
    ran = program(at / "a.pt", at / "x")
    assert ran.returncode == 2
    assert "--allow-pickle" in ran.stderr
    assert not (at / "mark").exists()


def test_the_bar_has_a_phase_at_a_time_and_ends_full():
    bars = []

    class Bar:
        def __init__(self, desc, total, **options):
            self.desc, self.total, self.n, self.closed = desc, total, 0, False
            bars.append(self)

        def update(self, count):
            self.n += count

        def close(self):
            self.closed = True

    with _cli._Bar(Bar) as progress:
        for step in [("writing", 0, 0), ("writing", 5, 9), ("writing", 9, 9), ("verifying", 7, 7)]:
            progress(*step)
    assert [(b.desc, b.n, b.total, b.closed) for b in bars] == [
        ("writing", 9, 9, True),
        ("verifying", 7, 7, True),
    ]


def test_importing_ringstow_imports_neither_torch_nor_the_converters():
    code = "import sys, ringstow; print({'torch', 'ringstow.convert'} & set(sys.modules))"
    assert python(code).stdout.strip() == "set()"


# Objects: opaque bytes in a checkpoint, as the writer for DCP stores values


def with_objects(path, objects):
    """Saves a checkpoint by one rank whose values are objects beside a tensor ``w``."""
    weight = torch.arange(4.0)
    session = ringstow._native.Session(str(path), 1)
    items = [("w", "F32", (4,), None, weight.data_ptr(), 16, None, None, False)]
    blobs = {}
    for name, value in objects.items():
        blob = io.BytesIO()
        torch.save(value, blob)
        blobs[name] = torch.frombuffer(bytearray(blob.getvalue()), dtype=torch.uint8)
        size = blobs[name].numel()
        items.append((name, "U8", (size,), None, blobs[name].data_ptr(), size, None, None, True))
    job = ringstow._native.start_write(items, str(path), 0, ringstow.Config().to_json())
    job.wait()
    job.result()
    leaves = {name: {"$object": name} for name in objects}
    tree = json.dumps({"w": {"$tensor": "w"}, "values": leaves})
    session.commit([job.receipt()], tree, ["w", *objects])
    return path


def test_objects_are_loaded_as_what_they_are(at):
    objects = {"step": 7, "config": {"lr": [1e-3, (1, 2)], "t": torch.ones(2)}}
    path = with_objects(at / "ckpt", objects)
    whole = ringstow.load(path)
    assert_same(whole, {"w": torch.arange(4.0), "values": objects})
    assert ringstow.load(path, keys=["values.step"]) == {"values": {"step": 7}}
    assert_same(ringstow.load(path, prefix="w"), {"w": torch.arange(4.0)})
    state = {"w": torch.zeros(4), "values": {"step": 0, "config": {"lr": None}}}
    ringstow.load_into(state, path)
    assert_same(state, whole)


def test_an_object_that_is_more_than_plain_values_needs_the_word(at):
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
    ran = python("from ringstow import _cli; _cli.main()", "show", at / "ckpt")
    assert ran.returncode == 0, ran.stderr
    assert "step: object step" in ran.stdout


def test_small_tensors_are_read_together_and_each_once(at):
    state = {f"w{i}": torch.randn(100 + i % 3) for i in range(500)}
    ringstow.save(state, at / "ckpt")
    checkpoint = ringstow._native.Checkpoint(str(at / "ckpt"))
    asked = []

    class Counted:
        tensors = checkpoint.tensors

        def load(self, names, verify, config):
            asked.extend(names)
            return checkpoint.load(names, verify, config)

    ahead = ReadAhead(Counted(), verify=True, config=ringstow.Config().to_json())
    for name, tensor in state.items():
        assert bytes(ahead.take(name)) == tensor.numpy().tobytes()
    assert sorted(asked) == sorted(state)


def test_what_dcp_saved_through_ringstow_is_ringstows(tmp_path):
    """Though a .metadata lies beside its manifest."""
    state = {"model": {"w": torch.arange(6.0)}, "step": 3}
    writer = pytest.importorskip("ringstow.dcp").StorageWriter()
    dcp.save(state, checkpoint_id=tmp_path / "saved", storage_writer=writer, no_dist=True)
    assert (tmp_path / "saved" / ".metadata").exists()
    convert(tmp_path / "saved", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0))
    assert loaded["step"] == 3
