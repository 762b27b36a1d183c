"""Small files that claim much: they take no more memory or time than others of their size."""

import json
import pickle
import struct

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import metadata_of
from support import assert_same, manifest_of, reseal

import ringstow
from ringstow._foreign import _pickles
from ringstow._state.tensors._memory import overlapping
from ringstow._state.tree import _packed_values
from ringstow.convert import convert

PRIME = (1 << 61) - 1  # integers that differ by multiples of it have one hash


def with_state(at, tree):
    """Return a checkpoint of ringstow's with this tree, and a sound checksum."""
    ringstow.save({}, at / "ckpt")
    manifest = manifest_of(at / "ckpt")
    manifest["state"] = tree
    reseal(at / "ckpt", manifest)
    return at / "ckpt"


# Views of few elements


@pytest.mark.parametrize(
    "views",
    [
        lambda: {"huge": torch.ones(1).expand(10**9)},
        lambda: {"deep": [torch.ones(1).expand(1 << 20, 1 << 10)]},
        lambda: {f"v{n}": torch.ones(1).expand(10**6 + n) for n in range(40)},
    ],
    ids=["one", "nested", "many"],
)
def test_views_of_few_elements_are_refused_before_they_are_copied(at, views):
    torch.save({"w": torch.ones(2), **views()}, at / "x.pt")
    for target in ("ringstow", "torch", "hf"):
        with pytest.raises(ringstow.FormatError, match=r"x\.pt has \d+ bytes, and its tensors"):
            convert(at / "x.pt", at / target, target=target)
        assert not (at / target).exists()
    with pytest.raises(ringstow.FormatError, match=r"they are views of the same elements"):
        ringstow.load(at / "x.pt")
    assert ringstow.load(at / "x.pt", keys=["w"])["w"].tolist() == [1, 1]
    with ringstow.open(at / "x.pt") as opened:
        assert opened["w"].load().tolist() == [1, 1]


def test_views_of_a_size_that_programs_save_are_copied(at):
    ids, weight = torch.arange(512).expand(1, -1), torch.randn(64, 64)
    state = {"ids": ids, "mask": torch.ones(1, 1).expand(64, 64), "w": weight, "t": weight.t()}
    torch.save(state, at / "x.pt")
    found = ringstow.load(at / "x.pt")
    convert(at / "x.pt", at / "ckpt")
    for one in (found, ringstow.load(at / "ckpt")):
        assert all(torch.equal(one[name], state[name]) for name in state)


# Bytes that several tensors have


def test_bytes_of_two_tensors_in_a_safetensors_file_are_damage(at):
    entries = {f"t{n}": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]} for n in range(9)}
    text = json.dumps(entries).encode()
    (at / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(ringstow.FormatError, match='"t1" begin at 0 of the data'):
        ringstow.load(at / "x.safetensors")


def test_bytes_of_two_tensors_in_an_object_of_dcp_are_damage():
    entries = {f"t{n}": {"dtype": "U8", "shape": [64], "data_offsets": [n, n + 64]} for n in (0, 1)}
    text = json.dumps({"__metadata__": {"state": "{}"}, **entries}).encode()
    with pytest.raises(ValueError, match="'t1' has bytes of another"):
        _packed_values.split(struct.pack("<Q", len(text)) + text + bytes(65))


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([(0, 4, "a"), (4, 8, "b"), (8, 8, "c"), (2, 2, "empty")], None),
        ([(4, 8, "b"), (0, 5, "a")], "b"),
        ([(0, 9, "a"), (1, 2, "b"), (3, 4, "c")], "b"),
    ],
)
def test_overlapping_names_the_tensor_that_begins_in_another(spans, found):
    assert overlapping(spans) == found


class Forged:
    """Pickles as an array or scalar of numpy over bytes that others have, too."""

    def __init__(self, kind, data):
        self.kind, self.data = kind, data

    def __reduce__(self):
        if self.kind == "scalar":
            return np._core.multiarray.scalar, (np.dtype(f"S{len(self.data)}"), self.data)
        shape = (len(self.data),)
        state = (1, shape, np.dtype("u1"), False, self.data)
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state


@pytest.mark.parametrize("kind", ["array", "scalar"])
def test_arrays_over_the_same_bytes_are_damage(at, kind):
    data = bytes(1 << 20)
    torch.save({"v": [Forged(kind, data) for _ in range(5000)]}, at / "x.pt")
    with pytest.raises(ringstow.CorruptCheckpointError, match="arrays of numpy have the same 1048"):
        ringstow.load(at / "x.pt")


def test_an_array_that_is_referred_to_twice_is_one(at):
    array = np.arange(5000)
    state = {"a": array, "b": [array], np.int64(3): {np.int64(4), "x"}, "e": np.zeros(0)}
    torch.save(state, at / "x.pt")
    found = ringstow.load(at / "x.pt")
    assert_same(found, state)


# Values of a manifest


def test_sizes_beyond_64_bits_are_named_as_damage(at):
    for size in (1 << 70, -(1 << 70), 1 << 63):
        with pytest.raises(ringstow.FormatError, match="integers of 64 bits"):
            ringstow.load(with_state(at, {"v": {"$size": [{"$int": str(size)}]}}))
    ringstow.save({"v": torch.Size([(1 << 63) - 1, -1])}, at / "fits")
    assert ringstow.load(at / "fits") == {"v": torch.Size([(1 << 63) - 1, -1])}


def collide(count, make):
    return [make(str(n * PRIME)) for n in range(2, count)]


MAKE = {
    "int": lambda digits: {"$int": digits},
    "tuple": lambda digits: {"$tuple": [{"$int": digits}]},
    "decimal": lambda digits: {"$value": "decimal.Decimal", "args": [digits]},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["$dict", "$set"])
def test_keys_that_were_chosen_to_collide_are_refused_at_once(at, name, kind):
    keys = collide(20_000, MAKE[name])
    body = [[key, 1] for key in keys] if kind == "$dict" else keys
    path = with_state(at, {"v": {kind: body}})
    for read in (ringstow.load, lambda path: ringstow.load_into({"v": 1}, path)):
        with pytest.raises(ringstow.FormatError, match="hash"):
            read(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["file", "old file", "object of dcp", "metadata of dcp"])
def test_a_pickle_with_keys_that_collide_is_refused_at_once(at, how):
    keys = [n * PRIME for n in range(2, 400)]  # more would keep the test itself busy
    state = {"v": [dict.fromkeys(keys, 1)], "w": torch.ones(1)}
    torch.save(state, at / "x.pt", _use_new_zipfile_serialization=how != "old file")
    if how == "metadata of dcp":
        (at / "x.pt").unlink()
        dcp.save({"w": torch.ones(1)}, checkpoint_id=at / "x.pt", no_dist=True)
        with metadata_of(at / "x.pt") as metadata:
            metadata.planner_data = dict.fromkeys(keys, ("w",))
    if how == "object of dcp":
        dcp.save({"v": (state["v"],)}, checkpoint_id=at / "x.pt.dcp", no_dist=True)
        (at / "x.pt").unlink()
        (at / "x.pt.dcp").rename(at / "x.pt")
    with pytest.raises(ringstow.CorruptCheckpointError, match="100 of its keys have the same hash"):
        ringstow.load(at / "x.pt")


def test_integers_as_text_are_counted_too():
    keys = {n * PRIME: 1 for n in range(2, 400)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError, match="100 of its keys have the same hash"):
            _pickles.refuse_collisions(pickle.dumps(keys, protocol))
        many = [(n << 70) + n for n in range(10_000)]
        _pickles.refuse_collisions(pickle.dumps(many, protocol))


def test_integers_of_any_size_are_keys(at):
    state = {
        "v": dict.fromkeys((*range(-300, 300), 1 << 61, 1 << 200, -(1 << 64)), 1),
        "s": {-1, -2},
    }
    ringstow.save(state, at / "ckpt")
    assert ringstow.load(at / "ckpt") == state
    torch.save(state, at / "x.pt")
    assert ringstow.load(at / "x.pt") == state


# Names of torch's


@pytest.mark.parametrize(
    "tree", [{"$dtype": "onnx"}, {"$value": "torch.layout", "args": ["_inductor"]}]
)
def test_no_name_in_a_file_makes_torch_import_a_module(at, tree, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(ringstow.UnsupportedError, match="has no"):
        ringstow.load(with_state(at, {"v": tree}))
    assert asked == []
