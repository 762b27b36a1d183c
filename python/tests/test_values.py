"""Every value loads equal, or the save refuses it; loading runs no code."""

import collections
import copy
import dataclasses
import io
import sys
import types

import numpy as np
import pytest
import torch
import value_list
from support import assert_same, codec, manifest_of, python, reseal
from value_list import EQUAL, REFUSED, Checked, Color, Config, Frozen, Point

import ringstow
from ringstow import InvalidStateError, UnsupportedError
from ringstow._state.tree import _encode, _walk
from ringstow.convert import convert


@pytest.mark.parametrize("name", EQUAL)
def test_comes_back_equal_and_is_loaded_into_a_state(name, tmp_path):
    state = {"w": torch.ones(2), "value": EQUAL[name]()}
    ringstow.save(state, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c"), state)
    part = ringstow.load(tmp_path / "c", prefix="value")
    assert_same(part, {"value": state["value"]} if "value" in part else {})
    into = {"w": torch.zeros(2), "value": EQUAL[name]()}
    ringstow.load_into(into, tmp_path / "c")
    assert_same(into, state)


@pytest.mark.parametrize("name", EQUAL)
def test_is_frozen_at_the_call(name):
    value = EQUAL[name]()
    back = codec({"value": value})["value"]
    if type(back).__hash__ is None:  # it is mutable
        assert back is not value
    if isinstance(value, io.BytesIO):
        value.write(b"xyz")
        assert back.getvalue() == b"0123456789"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_is_refused_with_a_remedy(name):
    make, remedy = REFUSED[name]
    with pytest.raises(ringstow.Error, match=r"^a\['b'\]") as caught:
        _encode.encode({"a": {"b": make()}})
    assert remedy in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_all_refused_values_are_in_one_error():
    state = {"step": 1, **{name: make() for name, (make, _) in list(REFUSED.items())[:10]}}
    with pytest.raises(InvalidStateError) as caught:
        _encode.encode({"config": state})
    lines = str(caught.value).splitlines()
    assert lines[0] == "10 values can't be saved:"
    for line, (name, (_, remedy)) in zip(lines[1:11], REFUSED.items(), strict=False):
        assert line.startswith(f"  config[{name!r}] is a")
        assert remedy in line
    assert "allow_pickle=True" in lines[-1]


def test_long_list_of_refused_values_is_truncated():
    with pytest.raises(InvalidStateError, match="^1000 values can't be saved:") as caught:
        _encode.encode({"locks": [object() for _ in range(1000)]})
    lines = str(caught.value).splitlines()
    assert "  and 980 more" in lines
    assert len(lines) < 30


def test_tensors_that_cannot_be_saved_are_in_the_same_error():
    inner = {}
    inner["self"] = inner
    state = {
        "mkldnn": torch.ones(2).to_mkldnn(),
        "meta": torch.ones(2, device="meta"),
        "text": "\ud800",
        "cycle": inner,
        "key": {torch.ones(1): 1},
    }
    with pytest.raises(InvalidStateError, match="^5 values") as caught:
        _encode.encode(state)
    for expected in ("to_dense", "materialize", "surrogate", "contains itself", "as a key"):
        assert expected in str(caught.value)
    only = {name: state[name] for name in ("mkldnn", "meta")}
    with pytest.raises(UnsupportedError, match="^2 values"):
        _encode.encode(only)


class Holder:
    def __init__(self, held):
        self.held = held


HELD = {
    "a tensor": lambda: torch.ones(1000),
    "a parameter": lambda: [torch.nn.Parameter(torch.ones(1))],
    "a module": lambda: {"m": torch.nn.Linear(1, 1)},
    "a storage": lambda: torch.ones(1).untyped_storage(),
    "a large array": lambda: np.ones(100_000),
}


@pytest.mark.parametrize("name", HELD)
def test_pickle_refuses_objects_with_tensors(name):
    with pytest.raises(InvalidStateError, match=r"a is a .*Holder, which holds a.*not pickled"):
        _encode.encode({"a": Holder(HELD[name]())}, allow_pickle=True)


def test_pickle_accepts_objects_with_small_arrays():
    back = codec({"a": Holder(np.ones(3))}, allow_pickle=True)["a"]
    assert_same(back.held, np.ones(3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: Point(tensor, 1),
        lambda tensor: collections.defaultdict(list, a=[tensor]),
        lambda tensor: Config(nested=tensor),
    ],
)
def test_containers_of_tensors_are_never_pickled(wrap, tmp_path):
    state = {"a": wrap(torch.ones(50_000))}
    report = ringstow.save(state, tmp_path / "c", allow_pickle=True)
    assert report.tensors == 1
    assert (tmp_path / "c" / "manifest.json").stat().st_size < 5000
    assert_same(ringstow.load(tmp_path / "c"), state)


# torch can't pickle the first; numpy unpickles the second in this machine's byte order.
NOT_CONVERTED = {"torch.memory_format", "big-endian array"}


@pytest.mark.parametrize("name", [name for name in EQUAL if name not in NOT_CONVERTED])
def test_is_converted_to_torch_and_back(name, tmp_path):
    """Tensors are lazy during conversion, in containers with fields as in all others."""
    state = {"w": torch.ones(2), "value": EQUAL[name]()}
    ringstow.save(state, tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "c.pt", target="torch", allow_pickle=True)
    convert(tmp_path / "c.pt", tmp_path / "d", target="ringstow", allow_pickle=True)
    assert_same(ringstow.load(tmp_path / "d"), state)


# The program's types.


def test_no_code_of_a_type_runs_when_a_value_is_loaded(tmp_path):
    ringstow.save({"a": Checked(3)}, tmp_path / "c")
    before = Checked.made
    assert ringstow.load(tmp_path / "c")["a"].total == 4
    assert Checked.made == before


def changed(path, change):
    """Save a checkpoint, then change the tree of ``a``."""
    ringstow.save({"w": torch.ones(2), "a": Config()}, path)
    manifest = manifest_of(path)
    manifest["state"]["a"] = change(manifest["state"]["a"])
    reseal(path, manifest)
    return path


TYPES = [
    ({"$dataclass": "no_such_module:A", "fields": {}}, "import no_such_module first"),
    ({"$dataclass": "value_list:NoSuch", "fields": {}}, "has no NoSuch"),
    ({"$dataclass": "os:system", "fields": {}}, "not imported"),
    ({"$dataclass": "subprocess:Popen", "fields": {"args": "true"}}, "is no dataclass"),
    ({"$dataclass": "value_list:Closing", "fields": {"path": "x"}}, "is no dataclass"),
    ({"$namedtuple": "value_list:Config", "fields": {}}, "is no named tuple"),
    ({"$namedtuple": "value_list:Point", "fields": {"x": 1}}, "field 'y'"),
    ({"$namedtuple": "value_list:Point", "fields": {"x": 1, "y": 1, "z": 1}}, "field 'z'"),
    ({"$dataclass": "value_list:Config", "fields": {"other": 1}}, "field 'other'"),
    ({"$dataclass": "value_list:Frozen", "fields": {}}, "field 'a'"),
    ({"$enum": "value_list:Color", "name": "GREEN"}, "Color.GREEN"),
    ({"$enum": "value_list:Color", "value": 1}, "Color.1"),
    ({"$enum": "value_list:Config", "name": "lr"}, "is no Enum"),
    ({"$str": "a", "type": "value_list:Config"}, "is no sub-class of str"),
]


@pytest.mark.parametrize(("tree", "said"), TYPES, ids=lambda each: str(each)[:50])
def test_missing_type_is_named_before_any_tensor_changes(tree, said, tmp_path):
    path = changed(tmp_path / "c", lambda _: tree)
    match = r"^a (is|was saved as) .*prefix= or keys="
    with pytest.raises(UnsupportedError, match=match) as caught:
        ringstow.load(path)
    assert said in str(caught.value)
    into = {"w": torch.zeros(2), "a": None}
    with pytest.raises(UnsupportedError, match="^a "):
        ringstow.load_into(into, path)
    assert into["w"].sum() == 0
    assert_same(ringstow.load(path, keys=["w"]), {"w": torch.ones(2)})


def test_load_does_not_import_modules(tmp_path):
    (tmp_path / "late.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass A: x: int")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import ringstow
if sys.argv[2] == "save":
    import late
    ringstow.save({"a": late.A(1)}, sys.argv[1] + "/c")
else:
    try:
        ringstow.load(sys.argv[1] + "/c")
    except ringstow.UnsupportedError as error:
        assert "import late first" in str(error)
    assert "late" not in sys.modules
    import late
    assert ringstow.load(sys.argv[1] + "/c") == {"a": late.A(1)}
"""
    for step in ("save", "load"):
        python(code, tmp_path, step, check=True)


def test_types_of_the_main_module_come_back(tmp_path):
    code = """
import dataclasses, enum, sys, ringstow
@dataclasses.dataclass
class Config: lr: float = 0.1
class Color(enum.Enum): RED = 1
state = {"config": Config(0.5), "color": Color.RED}
ringstow.save(state, sys.argv[1])
assert ringstow.load(sys.argv[1]) == state
"""
    python(code, tmp_path / "c", check=True)


def test_new_dataclass_field_gets_its_default_made_once(tmp_path, monkeypatch):
    ringstow.save({"a": Config(lr=0.5)}, tmp_path / "c")
    made = []

    @dataclasses.dataclass
    class Newer:
        lr: float
        betas: tuple
        name: str
        nested: object
        extra: list = dataclasses.field(default_factory=lambda: made.append(1) or [1])
        other: int = 5

    monkeypatch.setattr(value_list, "Config", Newer)
    newer = ringstow.load(tmp_path / "c")["a"]
    assert (newer.lr, newer.extra, newer.other) == (0.5, [1], 5)
    assert made == [1]


def test_load_runs_no_code_of_a_lazy_module(tmp_path, monkeypatch):
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail("code of the module ran")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    path = changed(tmp_path / "c", lambda _: {"$dataclass": "lazy:A", "fields": {}})
    with pytest.raises(UnsupportedError, match="has no A"):
        ringstow.load(path)


# Loading into containers with fields.


def test_tensors_of_containers_are_filled_in_place(tmp_path):
    def state(fill):
        return {
            "point": Point(torch.full((2,), fill), fill),
            "config": Config(lr=fill, nested=torch.full((2,), fill)),
            "frozen": Frozen(torch.full((2,), fill), fill),
            "space": types.SimpleNamespace(t=torch.full((2,), fill), step=fill),
            "deque": collections.deque([torch.full((2,), fill), fill]),
            "default": collections.defaultdict(dict, a={"t": torch.full((2,), fill), "n": fill}),
        }

    ringstow.save(state(1.0), tmp_path / "c")
    into = state(0.0)
    tensors = [into["point"].x, into["config"].nested, into["frozen"].a, into["space"].t]
    tensors += [into["deque"][0], into["default"]["a"]["t"]]
    config, frozen = into["config"], into["frozen"]
    ringstow.load_into(into, tmp_path / "c")
    assert_same(into, state(1.0))
    for tensor in tensors:
        assert tensor.tolist() == [1.0, 1.0]
    assert into["config"] is config
    assert into["frozen"] is not frozen
    assert into["frozen"].a is frozen.a


def test_containers_with_fields_that_differ_are_named(tmp_path):
    ringstow.save({"a": Config(nested=torch.ones(2)), "b": [1]}, tmp_path / "c")
    into = {"a": Point(torch.ones(2), 1), "b": Config(nested=torch.ones(1))}
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(into, tmp_path / "c")
    assert caught.value.mismatched == [
        "a is a value_list.Point here and a value_list.Config in the checkpoint",
        "b is a value_list.Config here and a list in the checkpoint",
    ]


def test_values_are_keys_too():
    keys = (Color.RED, Point(1, 2), frozenset({1}), 1j, Frozen(1), np.str_("x"))
    state = {"a": dict.fromkeys(keys, 1)}
    assert_same(codec(state), state)


def test_names_of_tensors_follow_the_fields():
    state = {"c": Config(nested=Point(torch.ones(1), torch.ones(2)))}
    names = [spec[0] for spec in _encode.encode(state).tensors]
    assert names == ["c.nested.x", "c.nested.y"]
    path = ("c", _walk.Attribute("nested"), _walk.Attribute("x"))
    assert "c.nested.x" in _walk.describe(path)


def test_a_set_of_text_is_saved_in_one_order():
    trees = {_encode.encode({"a": set(names)}).tree for names in ("abcdefgh", "hgfedcba")}
    assert trees == {'{"a":{"$set":["a","b","c","d","e","f","g","h"]}}'}


def test_two_leaves_of_one_dataclass_stay_distinct():
    config = Config(nested=[1])
    back = codec({"a": config, "b": config})
    assert_same(back, {"a": config, "b": copy.deepcopy(config)})
