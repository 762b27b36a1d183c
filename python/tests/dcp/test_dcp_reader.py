"""The reader in one process: filling targets, errors, and never running unknown code."""

from __future__ import annotations

import functools
import json
import pathlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load
from support import assert_same, flip, reseal, shards_of
from test_dcp_writer import cause
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ringstow
import ringstow.dcp
from ringstow._state.tree import _packed_values
from ringstow.dcp import LoadPlanner, StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a state and returns the checkpoint's path."""

    def save(state, **options):
        writer = StorageWriter(**options)
        dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)
        return tmp_path / "c"

    return save


def fetch(state, path, reader=None, **options):
    reader = reader or StorageReader()
    dcp.load(state, checkpoint_id=path, storage_reader=reader, **options)
    return reader


def test_tensors_are_filled_in_place(saved):
    floats = torch.arange(24.0).reshape(4, 6)
    path = saved({"a": floats, "b": floats + 1, "c": floats + 2})
    whole = torch.zeros(6, 12)
    targets = {"a": whole[1:5, 3:9], "b": torch.zeros(6, 4).t(), "c": torch.zeros(4, 6)}
    places = {key: tensor.data_ptr() for key, tensor in targets.items()}
    versions = {key: tensor._version for key, tensor in targets.items()}
    reader = fetch(targets, path)
    assert {key: tensor.data_ptr() for key, tensor in targets.items()} == places
    assert_same(targets["a"].contiguous(), floats)
    assert_same(targets["b"].contiguous(), floats + 1)
    assert float(whole.sum()) == float(floats.sum())
    assert all(targets[key]._version > version for key, version in versions.items())
    assert reader.report.tensor_bytes == 3 * 24 * 4
    assert reader.report.verified


def test_another_dtype_is_converted_as_torch_does(saved):
    values = torch.linspace(-3, 3, 1000)
    path = saved({"a": values, "b": values.to(torch.float64), "c": torch.arange(5)})
    targets = {
        "a": torch.zeros(1000, dtype=torch.bfloat16),
        "b": torch.zeros(1000, dtype=torch.float32),
        "c": torch.zeros(5, dtype=torch.complex64).conj(),
    }
    fetch(targets, path, StorageReader(config=ringstow.Config(pool_bytes=8 << 20)))
    assert_same(targets["a"], values.to(torch.bfloat16))
    assert_same(targets["b"], values)
    assert torch.equal(targets["c"], torch.arange(5).to(torch.complex64))


def test_copied_tensors_are_copied_in_small_batches(saved, monkeypatch):
    values = torch.arange(3_000_000.0)
    path = saved({"a": values, "b": values.to(torch.int32)})
    targets = {"a": torch.zeros(3_000_000, dtype=torch.float64), "b": torch.zeros(3_000_000)}
    sizes = []
    empty = torch.empty

    def counting(*args, **options):
        tensor = empty(*args, **options)
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    config = ringstow.Config(pool_bytes=4 << 20, block_bytes=1 << 20)
    fetch(targets, path, StorageReader(config=config))
    assert max(sizes) <= 4 << 20
    assert_same(targets["a"], values.to(torch.float64))
    assert_same(targets["b"], values)


def test_keys_that_share_memory_both_load(saved):
    path = saved({"a": torch.ones(4), "b": torch.ones(4) * 2})
    tied = torch.zeros(4)
    fetch({"a": tied, "b": tied}, path)
    assert_same(tied, torch.ones(4) * 2)


def test_a_subset_and_a_partial_load(saved):
    path = saved({"a": torch.ones(4), "b": {"c": torch.ones(2), "n": 5}})
    state = {"b": {"n": None}}
    fetch(state, path)
    assert state == {"b": {"n": 5}}
    state = {"a": torch.zeros(4), "new": torch.zeros(1)}
    fetch(state, path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(state, {"a": torch.ones(4), "new": torch.zeros(1)})
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        fetch({"new": torch.zeros(1)}, path)


def test_plain_ringstow_save_loads_with_its_ties(tmp_path):
    weight = torch.ones(3)
    ringstow.save({"a": weight, "b": [weight, {0: torch.zeros(2)}]}, tmp_path)
    state = {"a": torch.zeros(3), "b": [torch.zeros(3), {0: torch.ones(2)}]}
    fetch(state, tmp_path)
    assert_same(state, {"a": weight, "b": [weight, {0: torch.zeros(2)}]})


class Planner(DefaultLoadPlanner):
    """Returns targets of the wrong shape."""

    def resolve_tensor(self, item):
        tensor = super().resolve_tensor(item)
        return tensor[:1] if item.dest_index.fqn != "c" else tensor


def test_all_wrong_shapes_are_named_before_reading(saved):
    path = saved({name: torch.ones(3) for name in "abc"})
    state = {name: torch.zeros(3) for name in "abc"}
    with pytest.raises(CheckpointException) as caught:
        fetch(state, path, planner=Planner())
    error = cause(caught)
    assert type(error) is ringstow.KeyMismatchError
    assert [text[0] for text in error.mismatched] == ["a", "b"]
    assert not any(bool(tensor.any()) for tensor in state.values())


def test_our_planner_names_every_mismatch(saved):
    path = saved({"a": torch.ones(3), "b": torch.ones(3), "c": 1, "d": torch.ones(2), "e": 1})
    state = {"a": torch.zeros(4), "b": 5, "c": torch.zeros(1), "x": 1, "y": torch.ones(1), "e": 2}
    with pytest.raises(CheckpointException) as caught:
        fetch(state, path, planner=LoadPlanner())
    error = cause(caught)
    assert type(error) is ringstow.KeyMismatchError
    assert (error.path, error.missing, error.unexpected) == (str(path), ["x", "y"], ["d"])
    assert error.mismatched == [
        "a is [4] here and [3] in the checkpoint",
        "b is a int here and a tensor in the checkpoint",
        "c is a tensor here and an object in the checkpoint",
    ]
    assert state["e"] == 2
    state = {"e": None, "new": 7}
    fetch(state, path, planner=LoadPlanner(strict=False))
    assert state == {"e": 1, "new": 7}
    with pytest.raises(CheckpointException, match=r"a is \[4\] here"):
        fetch({"a": torch.zeros(4)}, path, planner=LoadPlanner(strict=False))
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "c": 0, "d": torch.zeros(2), "e": 0}
    fetch(state, path, planner=LoadPlanner())
    assert_same(state["a"], torch.ones(3))


class Weird:
    """A type that torch's restricted unpickler does not know."""

    ran = 0

    def __setstate__(self, state):
        type(self).ran += 1


class Weirder(Weird):
    pass


def test_unknown_pickles_are_refused_together_and_not_run(saved):
    state = {"a": Weird(), "b": {"c": [Weirder()]}, "fine": 5, "w": torch.ones(3)}
    path = saved(state, allow_pickle=True)
    Weird.ran = 0
    state = {"a": None, "b": {"c": None}, "fine": None, "w": torch.zeros(3)}
    with pytest.raises(CheckpointException) as caught:
        fetch(state, path)
    assert state["w"].sum() == 0
    error = cause(caught)
    assert type(error) is ringstow.UnsupportedError
    for word in ("a needs", "b.c needs", "Weird", "Weirder", "add_safe_globals", "allow_pickle"):
        assert word in str(error)
    assert "fine" not in str(error)
    assert Weird.ran == Weirder.ran == 0


def test_allowed_types_name_the_further_types_they_need(saved, monkeypatch):
    """NumPy's scalars need their dtype's class, which the pickle does not name."""
    # An older ringstow saved them like this.
    monkeypatch.setattr(_packed_values, "pack", lambda *args: b"")
    saved = functools.partial(saved, allow_pickle=True)
    path, state = saved({"a": np.float64(1.5)}), {"a": None}
    names = ["numpy._core.multiarray.scalar", "numpy.dtype"]
    with pytest.raises(CheckpointException) as caught:
        fetch(state, path)
    assert f"a needs {', '.join(names)}." in str(cause(caught))
    named = [np._core.multiarray.scalar, np.dtype]
    with torch.serialization.safe_globals(named), pytest.raises(CheckpointException) as caught:
        fetch(state, path)
    assert "numpy.dtypes.Float64DType" in str(cause(caught))
    assert "add_safe_globals" in str(cause(caught))
    assert "In PyTorch 2.6, we changed" not in str(cause(caught))
    with torch.serialization.safe_globals([*named, np.dtypes.Float64DType]):
        fetch(state, path)
    assert state == {"a": 1.5}


def test_pickles_load_with_allow_pickle(saved):
    path = saved({"a": Weird(), "b": pathlib.Path("x")}, allow_pickle=True)
    state = {"a": None}
    fetch(state, path, StorageReader(allow_pickle=True))
    fetch({"b": None}, path)
    assert type(state["a"]) is Weird
    with torch.serialization.safe_globals([Weird]):
        fetch(state, path)


def test_a_missing_checkpoint_is_logged_once(tmp_path, caplog):
    with pytest.raises(CheckpointException, match="metadata is None"):
        fetch({"a": 1}, tmp_path / "nothing")
    (error,) = (r for r in caplog.records if r.name == "ringstow")
    assert error.levelname == "ERROR"
    assert error.message.endswith(f"'{tmp_path / 'nothing'}'")  # not a rank checkpoint below it


def test_stock_checkpoint_is_not_said_to_have_been_removed(tmp_path):
    """Regression: the error ended with "no checkpoint was saved there, or it was removed"."""
    dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(FileNotFoundError, match="no rank00003 either.*use_collectives") as caught:
        StorageReader(tmp_path).read_metadata(rank=3)
    assert caught.value.filename == str(tmp_path)
    assert "removed" not in str(caught.value)
    with pytest.raises(ringstow.NoCheckpointError, match="own format"):
        StorageReader(tmp_path).read_metadata()


def test_load_without_a_path_is_refused(caplog):
    with pytest.raises(CheckpointException):
        dcp.load({"a": 1}, storage_reader=StorageReader())
    assert "there is no path to load from" in caplog.text


def test_the_mark_is_never_read(saved):
    path = saved({"a": torch.ones(2)})
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert_same(load(path, {"a": torch.ones(2)}), {"a": torch.ones(2)})


def test_damage_is_found_unless_verify_is_off(saved):
    path = saved({"a": torch.ones(5000)})
    flip(shards_of(path)[0], -1)
    with pytest.raises(CheckpointException) as caught:
        fetch({"a": torch.zeros(5000)}, path)
    assert type(cause(caught)) is ringstow.CorruptCheckpointError
    fetch({"a": torch.zeros(5000)}, path, StorageReader(verify=False))


def test_state_that_names_an_unknown_tensor_is_refused(saved):
    path = saved({"a": torch.ones(2)})
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["state"] = {"a": {"$tensor": "b"}}
    reseal(path, manifest)
    with pytest.raises(ringstow.FormatError):
        StorageReader(path).read_metadata()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch without 4-bit floats")
def test_pairs_of_4_bit_floats(saved):
    raw = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    path = saved({"a": raw.view(torch.float4_e2m1fn_x2)})
    metadata = StorageReader(path).read_metadata().state_dict_metadata["a"]
    assert metadata.size == (4, 6)
    target = torch.zeros(4, 6, dtype=torch.uint8)
    fetch({"a": target.view(torch.float4_e2m1fn_x2)}, path)
    assert_same(target, raw)


def test_values_pickled_by_ringstow_need_allow_pickle(tmp_path, caplog):
    ringstow.save({"a": Weird(), "n": 1}, tmp_path, allow_pickle=True)
    Weird.ran = 0
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: a"):
        fetch({"a": None, "n": None}, tmp_path)
    assert "a was saved with pickle" in caplog.text
    assert Weird.ran == 0
    state = {"a": None, "n": None}
    fetch(state, tmp_path, StorageReader(allow_pickle=True))
    assert type(state["a"]) is Weird
    assert state["n"] == 1
