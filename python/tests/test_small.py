"""Many small tensors: the native passes over a state, and what they must not change."""

import json
import math
import typing

import numpy as np
import pytest
import torch
from support import assert_same

import ringstow
from ringstow import _native
from ringstow._state.tensors import _torch
from ringstow._state.tree import _skeleton
from ringstow._state.tree._walk import Leaf

KIB = 1024
UNIT = 2 << 20


def save(state, path):
    ringstow.save(state, path)
    return ringstow.load(path)


def many(count, size=KIB):
    return {f"layers.{n}.weight": torch.full((size,), float(n)) for n in range(count)}


def shown(node):
    """A skeleton with its types, in a form that can be compared."""
    if isinstance(node, Leaf):
        return ("Leaf", node.tag, shown(node.body), node.dtype)
    if isinstance(node, dict):
        return (type(node), [(shown(key), shown(child)) for key, child in node.items()])
    if isinstance(node, list | tuple):
        return (type(node), [shown(child) for child in node])
    return (type(node), repr(node))


def by_python(text):
    return json.loads(
        text, object_pairs_hook=_skeleton._object, parse_constant=_skeleton._no_constant
    )


USUAL = [
    "{}",
    ' { "a" : [ ] , "b":\t{}\n} ',
    '{"w":{"$tensor":"w"},"b":{"$tensor":"other"}}',
    '{"a":{"$tuple":[1,2.5,-3e2,true,false,null]},"i":-0,"f":-0.0,"big":123456789012345678}',
    '{"o":{"$odict":{"x":{"$tensor":"o.x"}},"attrs":{"_metadata":{"":{"version":1}}}}}',
    '{"d":{"$dict":[[0,{"$tensor":"d.0"}],["k",1]]}}',
    '{"q\\"\\\\\\u00e9\\ud83d\\ude00":"\\n","é😀":"ü"}',
    '{"n":{"$ndarray":"n","dtype":"<f4"},"i":{"$int":"123456789012345678901234567890"}}',
    '{"nested":[[[[{"a":[{"b":{"$tensor":"deep"}}]}]]]]}',
]


@pytest.mark.parametrize("text", USUAL)
def test_native_parser_makes_the_skeleton_that_pythons_makes(text):
    assert shown(_native.parse_tree(text, _skeleton._object)) == shown(by_python(text))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}x", '{"a":1,}', "[1,]", '{"a":1 "b":2}', '{"a":NaN}', '{"a":01}', '{"a":+1}'),
        *('{"a":1.}', '{"a":1e999}', '{"a":12345678901234567890}', '{"a":1,"a":2}'),
        *('{"a":"\\ud800"}', '{"a":"\\x"}', '{"a":"\t"}', '{"a":"open}'),
        *('{"w":{"$tensor":"w","x":1}}', "nul", "[" * 150 + "]" * 150),
    ],
)
def test_what_the_native_parser_does_not_know_is_for_pythons(text):
    assert _native.parse_tree(text, _skeleton._object) is None


def test_number_beyond_floats_is_what_pythons_parser_makes_of_it():
    assert math.isinf(_skeleton.parse('{"a":1e999}', "/c")["a"])
    assert _skeleton.parse('{"a":12345678901234567890}', "/c")["a"] == 12345678901234567890


def test_loaded_tensors_have_storages_and_versions_of_their_own(tmp_path):
    loaded = save(many(100), tmp_path / "c")
    first, second = loaded["layers.0.weight"], loaded["layers.1.weight"]
    assert first.untyped_storage().nbytes() == first.nbytes == 4 * KIB
    assert not first._is_view()
    assert first.is_leaf
    assert not first.requires_grad
    version = second._version
    first.add_(1)
    assert second._version == version
    assert second.eq(1).all()
    assert first.eq(1).all()
    with pytest.raises(RuntimeError):
        first.untyped_storage().resize_(8 * KIB)


class Pair(typing.NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_tied_tensors_share_memory_in_all_containers(tmp_path):
    weight, array = torch.ones(4), np.ones(4, dtype=np.float32)
    state = {
        "a": weight,
        "list": [weight, {"b": weight}],
        "tuple": (weight, 1),
        "pair": Pair(weight, torch.zeros(2)),
        "array": array,
        "view": torch.from_numpy(array),
    }
    loaded = save(state, tmp_path / "c")
    loaded["a"].fill_(7)
    (first, second), third, pair = loaded["list"], loaded["tuple"], loaded["pair"]
    assert all(one.eq(7).all() for one in (first, second["b"], third[0], pair.one))
    assert (third[1], pair.other.tolist()) == (1, [0, 0])
    assert loaded["a"] is not loaded["list"][0]
    loaded["array"].fill(3)
    assert loaded["view"].eq(3).all()


def resident(address):
    """Bytes of memory that the mapping around an address has."""
    found = -1
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                is_it = begin <= address < end
            elif is_it and head == "Rss:":
                found = int(line.split()[1]) * KIB
    return found


def test_kept_small_tensor_keeps_no_more_than_its_huge_page(tmp_path):
    loaded = save(many(4096), tmp_path / "c")
    kept = loaded["layers.2048.weight"]
    assert resident(kept.data_ptr()) >= 7 * UNIT
    del loaded
    assert 0 < resident(kept.data_ptr()) <= UNIT
    assert kept.eq(2048).all()


def test_damaged_checkpoint_fails_although_its_tensors_are_made(tmp_path):
    ringstow.save(many(1000), tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    with open(shard, "r+b") as file:
        file.seek(-100, 2)
        file.write(b"damage")
    for _ in range(3):
        with pytest.raises(ringstow.CorruptCheckpointError, match="layers"):
            ringstow.load(tmp_path / "c")


def test_failing_builder_ends_the_load(tmp_path, monkeypatch):
    ringstow.save(
        {"a": torch.ones(2), "h": torch.ones(2, dtype=torch.float8_e4m3fn)}, tmp_path / "c"
    )

    def missing(code, key):
        raise ringstow.UnsupportedError(f"{key}: no {code}")

    monkeypatch.setattr(_torch, "dtype_of", missing)
    with pytest.raises(ringstow.UnsupportedError, match="h: no F8_E4M3"):
        ringstow.load(tmp_path / "c")


def test_load_into_fills_thousands_and_marks_them_changed(tmp_path):
    ringstow.save(many(2000, 8), tmp_path / "c")
    state = {name: torch.zeros(8) for name in many(2000, 8)}
    versions = {name: tensor._version for name, tensor in state.items()}
    report = ringstow.load_into(state, tmp_path / "c")
    assert report.tensors == 2000
    assert_same(state, many(2000, 8))
    assert all(state[name]._version > versions[name] for name in state)


@pytest.mark.parametrize("order", [1, -1])
def test_load_into_tensors_of_one_memory_fills_it_once_if_the_stored_are_equal(tmp_path, order):
    names = ["a", "b", "c", "d"][::order]
    ringstow.save({name: torch.ones(4) for name in names}, tmp_path / "same")
    ringstow.save({name: torch.full((4,), ord(name)) * 1.0 for name in names}, tmp_path / "other")
    weight = torch.zeros(4)
    state = {"a": weight, "b": weight, "c": weight.numpy(), "d": torch.zeros(4)}
    ringstow.load_into(state, tmp_path / "same")
    assert weight.eq(1).all()
    assert state["d"].eq(1).all()
    with pytest.raises(ringstow.KeyMismatchError, match="are one tensor here and two that differ"):
        ringstow.load_into(state, tmp_path / "other")


def test_load_into_names_what_does_not_fit_among_thousands(tmp_path):
    ringstow.save(many(1500, 8) | {"odd": torch.ones(3)}, tmp_path / "c")
    state = {name: torch.zeros(8) for name in many(1500, 8)}
    state |= {"odd": torch.zeros(4), "only here": torch.zeros(1)}
    with pytest.raises(ringstow.KeyMismatchError) as failed:
        ringstow.load_into(state, tmp_path / "c")
    assert "odd" in str(failed.value)
    assert "only here" in str(failed.value)
    assert all(tensor.eq(0).all() for tensor in state.values())
