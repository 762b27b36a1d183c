"""The pure parts: trees, targets, rebuilt states."""

from __future__ import annotations

import collections
import json
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import ringstow
from ringstow._ranks._team import survives
from ringstow._state.tree import _build
from ringstow._state.tree._skeleton import parse
from ringstow._state.tree._walk import rebuild
from ringstow.dcp import _state_copies, _targets
from ringstow.dcp._containers import containers_of, joined
from ringstow.dcp._metadata import Contents, Entry, Notes, tree_of
from ringstow.dcp._rank_errors import picklable

pytestmark = pytest.mark.torch_seam

T = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])
OBJECT = BytesStorageMetadata()


def tree(state, paths):
    return json.loads(tree_of(Metadata(state, planner_data=paths)))


def contents(names, text):
    rows = [(name, "U8", (1,), True, [((0,), (1,))]) for name in names]
    return Contents.of("/c", rows, text)


def test_tree_nests_as_the_default_planner_flattened():
    state = {"a.b": T, "a.0": OBJECT, "l.0": T, "l.2": OBJECT, "d.$x": T}
    paths = {"a.b": ("a", "b"), "a.0": ("a", "0"), "l.0": ("l", 0), "l.2": ("l", 2)}
    paths["d.$x"] = ("d", "$x")
    assert tree(state, paths) == {
        "a": {"b": {"$tensor": "a.b"}, "0": {"$object": "a.0"}},
        "l": [{"$tensor": "l.0"}, {}, {"$object": "l.2"}],
        "d": {"$dict": [["$x", {"$tensor": "d.$x"}]]},
    }


@pytest.mark.parametrize(
    "paths",
    [
        None,
        "nonsense",
        {"a": ("a",)},
        {"a": ("a",), "a.b": ("a", "b")},
        {"a": ("x",), "a.b": ("x",)},
        {"a": (), "a.b": ("b",)},
        {"a": (0,), "a.b": ("b",)},
        {"a": ("a",), "a.b": ("b",) * 300},
    ],
)
def test_paths_that_do_not_fit_make_a_flat_tree(paths):
    assert tree({"a": T, "a.b": T}, paths) == {"a": {"$tensor": "a"}, "a.b": {"$tensor": "a.b"}}


def test_list_with_a_huge_gap_becomes_a_dict():
    found = tree({"a.0": T, "a.9": T}, {"a.0": ("a", 0), "a.9": ("a", 10**9)})
    assert found == {"a": {"$dict": [[0, {"$tensor": "a.0"}], [10**9, {"$tensor": "a.9"}]]}}


KEYS = st.text(st.characters(codec="utf-8"), max_size=3)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        st.integers(),
        lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(STATES)
def test_planner_data_survives_the_tree(state):
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:
        return  # torch refuses two keys with the same text
    text = tree_of(Metadata(dict.fromkeys(flat, OBJECT), planner_data=paths))
    found = contents(flat, text)
    assert found.metadata().planner_data == paths


ITEM_KEYS = KEYS | st.integers(-3, 3) | st.booleans() | st.none() | st.tuples(st.integers(0, 2))
CONTAINERS = st.dictionaries(
    KEYS,
    st.recursive(
        st.integers(),
        lambda inner: (
            st.builds(
                lambda make, items: make(items),
                st.sampled_from([dict, OrderedDict, lambda items: defaultdict(list, items)]),
                st.dictionaries(ITEM_KEYS, inner, max_size=3),
            )
            | st.builds(
                Counter, st.dictionaries(st.integers(-3, 3) | KEYS, st.integers(), max_size=3)
            )
            | st.lists(inner, max_size=3)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=300)
@given(CONTAINERS)
def test_the_tree_has_every_container_that_dcp_has_flattened(state):
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:
        return  # torch refuses two keys with the same text
    notes = containers_of(state, with_metadata=True)
    metadata = Metadata(dict.fromkeys(flat, OBJECT), planner_data=paths)
    text = tree_of(metadata, Notes(joined([notes, {}]), {}))
    builder = _build.Builder(_build.Contents("/c", {}.get), {})

    def made(leaf, path):
        return flat[leaf.body] if leaf.tag == "$object" else builder.make(leaf, path)

    assert_same(rebuild(parse(text, "/c"), (), made), state)


def test_tied_tensors_are_one_entry_under_two_names():
    text = json.dumps({"a": {"$tensor": "a"}, "b": {"c": {"$tensor": "a"}}, "n": 5})
    found = contents(["a"], text)
    assert found.entries["a"] is found.entries["b.c"]
    assert found.paths == {"a": ("a",), "b.c": ("b", "c"), "n": ("n",)}
    assert found.values == {"n": 5}


def test_paths_that_read_the_same_keep_the_manifests_names():
    text = json.dumps({"a.b": {"$tensor": "a.b"}, "a": {"b": {"$tensor": "a.b#2"}}})
    found = contents(["a.b", "a.b#2"], text)
    assert found.entries["a.b"].name == "a.b"
    assert found.entries["a.b#2"].name == "a.b#2"


def test_tree_that_names_a_missing_tensor_is_refused():
    with pytest.raises(ringstow.FormatError, match="'z', which the manifest does not list"):
        contents(["a"], json.dumps({"a": {"$tensor": "z"}}))


def test_dtype_unknown_to_torch_is_skipped_and_logged(caplog):
    found = Contents.of("/c", [("a", "F6", (1,), False, [((0,), (1,))])], None)
    assert found.metadata().state_dict_metadata == {}
    assert "/c: a: torch" in caplog.text


def fill(target, name="a", dest=(0,), offsets=None, dtype=torch.float32):
    index, zero = MetadataIndex(name, dest), [0] * target.dim()
    begin, at = torch.Size(offsets or zero), torch.Size(zero)
    item = ReadItem(LoadItemType.TENSOR, index, begin, index, at, target.shape)
    entry = Entry(name, "F32", tuple(target.shape), False, [])
    return _targets.Fill(item, entry, 0, tuple(zero), target, dtype)


def test_columns_of_a_tensor_are_read_in_place():
    whole = torch.zeros(4, 8)
    fills = [fill(whole[:, :3], offsets=[0, 0]), fill(whole[:, 3:], offsets=[0, 3])]
    assert _targets.split(fills) == (fills, [])


def test_shared_memory_is_read_into_once():
    tied = torch.zeros(4)
    fills = [fill(tied, "a"), fill(torch.zeros(4), "b"), fill(tied, "c"), fill(tied[2:], "d")]
    assert _targets.split(fills) == (fills[:2], fills[2:])


def test_first_of_overlapping_targets_is_read_in_place():
    whole = torch.zeros(8)
    across = [fill(whole[2:6], "b"), fill(whole[:4], "a"), fill(whole[4:], "c")]
    apart = [fill(torch.zeros(4), "d"), fill(torch.zeros(0), "e")]
    assert _targets.split(across + apart) == ([across[0], apart[0]], across[1:])


def test_same_region_requested_twice_is_read_once():
    fills = [fill(target := torch.zeros(4)), fill(target)]
    assert _targets.split(fills) == (fills[:1], fills[1:])


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3).expand(2, 3),
        torch.zeros(8).as_strided((3, 3), (2, 1)),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.zeros(3, device="meta"),
    ],
    ids=["expanded", "overlapping", "dtype", "neg", "device"],
)
def test_targets_that_cannot_take_bytes_are_copied(target):
    assert _targets.split([one := fill(target)]) == ([], [one])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.integers(4, 64))
def test_batches_cover_every_element_once_and_stay_small(shapes, limit):
    targets = [torch.zeros(shape) for shape in shapes]
    fills = [fill(target, str(n)) for n, target in enumerate(targets) if target.numel()]
    for batch in _targets.batches(fills, limit):
        assert sum(one.nbytes for one in batch) <= limit
        for one in batch:
            at = tuple(slice(o, o + n) for o, n in zip(one.offsets, one.target.shape, strict=True))
            assert targets[int(one.entry.name)][at].data_ptr() == one.target.data_ptr()
            one.target.add_(1)
    assert all(bool((target == 1).all()) for target in targets)


def test_rebuilt_state_shares_only_the_tensors():
    inner = collections.OrderedDict(a=torch.ones(1))
    state = {"l": [1, inner, (2, {"x": set()})], "o": {"s": {1}}}
    twin = _state_copies.rebuild(state, lambda tensor, _: tensor)
    assert twin == state
    assert twin["l"][1]["a"] is inner["a"]
    assert type(twin["l"][1]) is collections.OrderedDict
    state["o"]["s"].add(2)
    inner["b"] = 1
    assert twin["o"]["s"] == {1}
    assert "b" not in twin["l"][1]


def test_uncopyable_value_is_named():
    with pytest.raises(ringstow.InvalidStateError, match=r"a\['b'\] is a generator"):
        _state_copies.rebuild({"a": {"b": (n for n in ())}}, lambda tensor, _: tensor)


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_unpicklable_error_becomes_a_picklable_one():
    @picklable
    def method():
        raise Unpicklable("why", "how")

    with pytest.raises(ringstow.Error, match="Unpicklable: why") as caught:
        method()
    assert survives(caught.value)
    assert not survives(Unpicklable("why", "how"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/c"),
        ringstow.KeyMismatchError("m", path="/c", missing=["a"]),
        ringstow.BusyError("m", path="/c"),
        KeyboardInterrupt(),
    ],
)
def test_errors_are_sent_to_other_ranks_unchanged(error):
    assert survives(error)
