"""Values that refer back to themselves: no walk fails on them, and what can't be saved is named."""

import argparse
import collections
import dataclasses
import enum

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringstow
import ringstow.dcp
from ringstow._foreign import _dcp
from ringstow._state import _torch_private
from ringstow._state.tree import _cycles, _encode
from ringstow.dcp import _state_copies
from ringstow.integrations._kit import _values


class Loss(enum.Enum):
    MSE = "mse"


class Owner:
    """Has a part that points back, as trainers, models and their configurations do."""

    def __init__(self):
        self.weight = torch.ones(1 << 16)
        self.part = Part(self)


@dataclasses.dataclass
class Part:
    owner: object
    loss: Loss = Loss.MSE


class Slotted:
    __slots__ = ("parent", "weight")


class Config(collections.abc.MutableMapping):
    """Stands for OmegaConf's containers: parents, and values that refuse to be read."""

    def __init__(self, parent=None, **content):
        self._parent, self._content = parent, content
        for value in content.values():
            if isinstance(value, Config):
                value._parent = self

    def __getitem__(self, key):
        if self._content[key] == "???":
            raise LookupError(f"{key} is missing")
        return self._content[key]

    def __setitem__(self, key, value):
        self._content[key] = value

    def __delitem__(self, key):
        del self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


def slotted():
    one = Slotted()
    one.parent, one.weight = [one], torch.ones(1 << 16)
    return one


def two_that_point_at_each_other():
    one, other = Part(None), Part(None)
    one.owner, other.owner = other, one
    return one


def in_itself(one, add):
    add(one, one)
    return one


NO_TENSORS = {
    "enum": lambda: Loss.MSE,
    "dataclass with an enum": lambda: Part(None),
    "two objects": two_that_point_at_each_other,
    "config": lambda: Config(a=Config(b=[1, 2]), c="???"),
    "namespace": lambda: in_itself(
        argparse.Namespace(lr=0.1), lambda one, self: vars(one).update(me=self)
    ),
    "list": lambda: in_itself([1], list.append),
    "dict": lambda: in_itself({}, lambda one, self: one.update(me=self)),
    "deque": lambda: in_itself(collections.deque(), collections.deque.append),
}
WITH_A_TENSOR = {
    "owner": Owner,
    "part": lambda: Owner().part,
    "slots": slotted,
    "config": lambda: Config(a=Config(weight=torch.ones(1 << 16)), c="???"),
    "list": lambda: in_itself([torch.ones(1 << 16)], list.append),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_adapters_find_no_tensor_where_there_is_none(name):
    assert list(_values.tensors_of({"hyper_parameters": NO_TENSORS[name]()})) == []


@pytest.mark.parametrize("make", WITH_A_TENSOR.values(), ids=WITH_A_TENSOR)
def test_adapters_find_the_tensor_of_an_object_once(make):
    held = make()
    (found,) = _values.tensors_of({"hyper_parameters": [held, held]})
    assert found.numel() == 1 << 16
    assert _values.has_large((held,))


def test_adapters_do_not_enter_what_belongs_to_the_program():
    class Kind:
        shared = torch.ones(1 << 16)

    def function():
        return None

    function.cache = torch.ones(1 << 16)
    assert not _values.has_large([Kind, function, torch, Kind().__init__])


@pytest.mark.parametrize("name", ["namespace", "list", "dict", "deque", "two objects"])
def test_a_save_names_the_key_of_a_value_in_itself(name, tmp_path):
    with pytest.raises(ringstow.InvalidStateError, match=r"^v\S+ contains itself"):
        ringstow.save({"v": NO_TENSORS[name]()}, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_an_adapters_check_saves_what_comes_back_and_names_the_rest():
    _values.check("meta", ({"loss": Loss.MSE, "part": Part(None)},), allow_pickle=False)
    with pytest.raises(ringstow.InvalidStateError, match=r"meta\[0\]\.owner\.owner contains it"):
        _values.check("meta", (two_that_point_at_each_other(),), allow_pickle=False)
    with pytest.raises(ringstow.InvalidStateError, match=r"meta\[0\] is a test_cycles\.Owner"):
        _values.check("meta", (Owner(),), allow_pickle=False)


@dataclasses.dataclass(eq=False)
class Key:
    me: object = None


def test_a_key_that_refers_to_itself_is_named():
    key = Key()
    for me in (key, [torch.ones(1), key]):
        key.me = me
        with pytest.raises(ringstow.InvalidStateError, match="contains itself"):
            _encode.encode({"v": {key: 1}})


@pytest.mark.parametrize("name", ["list", "dict"])
@pytest.mark.parametrize(
    "walk",
    [
        lambda state: _state_copies.rebuild(state, lambda tensor, _: tensor),
        lambda state: list(_state_copies.tensors(state)),
        _torch_private.flattened,
        lambda state: ringstow.dcp.SavePlanner().set_up_planner(state),
        lambda state: ringstow.dcp.LoadPlanner().set_up_planner(state),
    ],
    ids=["rebuild", "tensors", "flattened", "save planner", "load planner"],
)
def test_dcp_names_the_key_of_a_value_in_itself(walk, name):
    match = r"^a\['v'\]\S+ contains itself: save it with"
    with pytest.raises(ringstow.InvalidStateError, match=match):
        walk({"a": {"v": NO_TENSORS[name]()}})


def test_dcp_saves_an_object_of_plain_values_in_itself(tmp_path):
    state = {"v": (NO_TENSORS["list"](),)}
    dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(tmp_path / "one"), no_dist=True)
    into = {"v": ([],)}
    dcp.load(into, storage_reader=ringstow.dcp.StorageReader(tmp_path / "one"), no_dist=True)
    ((one,),) = into.values()
    assert one[0] == 1
    assert one[1] is one


@pytest.mark.parametrize("name", NO_TENSORS)
def test_a_load_replaces_a_value_in_itself_or_names_what_differs(name, tmp_path):
    ringstow.save({"w": torch.ones(1), "v": {} if name == "dict" else 3}, tmp_path / "one")
    into = {"w": torch.zeros(1), "v": NO_TENSORS[name]()}
    ringstow.save({"w": torch.ones(1)}, tmp_path / "without")
    with pytest.raises(ringstow.KeyMismatchError, match=r"\(1\): v"):
        ringstow.load_into(into, tmp_path / "without")
    # A save refuses some, and others hold them; a dict stays, and its items are compared.
    refused = dict.fromkeys(("two objects", "config", "namespace"), "which a load cannot fill")
    refused["dict"] = r"not in the checkpoint \(1\): v\.me"
    if name in refused:
        with pytest.raises(ringstow.KeyMismatchError, match=refused[name]):
            ringstow.load_into(into, tmp_path / "one")
        return
    ringstow.load_into(into, tmp_path / "one")
    assert into == {"w": torch.ones(1), "v": 3}


def test_an_object_of_dcp_in_itself_gets_its_numbers():
    inner = {"param_groups": [{"params": [0]}], "state": {"0": {"step": 1}}}
    inner["again"] = {"inner": inner}
    state = {"optimizer": inner}
    _dcp._restore_known(state)
    assert inner["state"] == {0: {"step": 1}}


def test_shared_values_are_counted_as_often_as_a_walk_meets_them():
    node = [1]
    for _ in range(100):
        node = [node, node]
    assert _cycles.count({"v": node}) == 2**100 * 3


def test_values_nested_too_deep_are_named():
    node = [1]
    for _ in range(300):
        node = [node]
    with pytest.raises(_cycles.NestingError, match=r"^v\[0\].*nested more than 200 levels"):
        _cycles.count({"v": node})
