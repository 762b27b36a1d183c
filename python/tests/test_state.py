"""Any state loads equal, including types and order; other values are refused by name."""

import collections
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, codec, python, raising

from ringstow import FormatError, InvalidStateError, UnsupportedError
from ringstow._state.tensors import _torch
from ringstow._state.tree import _build, _encode, _skeleton

TORCH_DTYPES = [getattr(torch, name) for name in _torch.CODES if hasattr(torch, name)]
FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # older supported versions of torch lack it
NUMPY_DTYPES = ["|b1", "|u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", ">c16"]

text = st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**4000), max_value=2**4000),
    st.floats(),
    text,
    st.binary(max_size=20),
    st.sampled_from([2**53, 2**53 + 1, -(2**53), -0.0, math.nan, math.inf, -math.inf, 1e16]),
    st.sampled_from([torch.float32, torch.Size([2, 3]), torch.Size([]), torch.device("cuda:1")]),
    st.builds(np.float32, st.floats(width=32)),
    st.sampled_from([np.int64(-1), np.bool_(True), np.complex128(1j), np.uint8(7)]),
)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if dtype == FLOAT4 and not shape:
        shape = [1]
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).random_(0, 2)
    return tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    array = np.arange(math.prod(shape)).reshape(shape).astype(draw(st.sampled_from(NUMPY_DTYPES)))
    return array[::-1] if draw(st.booleans()) and shape else array


keys = st.one_of(
    text,
    st.integers(),
    st.sampled_from(["$tensor", "$", "", "a.b", "__metadata__", None, 2.5, b"x", torch.float16]),
    st.tuples(st.integers(), text),
)


def nested(children):
    pairs = st.lists(st.tuples(keys, children), max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        pairs.map(dict),
        pairs.map(collections.OrderedDict),
        st.dictionaries(text, children, max_size=4),
    )


values = st.recursive(st.one_of(scalars, tensors(), arrays()), nested, max_leaves=25)


@given(st.dictionaries(keys, values, max_size=5))
@settings(max_examples=300, deadline=None)
def test_any_state_comes_back_equal(state):
    assert_same(codec(state), state)


@given(st.dictionaries(keys, values, max_size=5))
@settings(max_examples=100, deadline=None)
def test_every_tensor_gets_a_valid_name_of_its_own(state):
    names = [spec[0] for spec in _encode.encode(state).tensors]
    assert len(set(names)) == len(names)
    assert "__metadata__" not in names


def test_the_tree_is_the_documented_one():
    odict = collections.OrderedDict(w=torch.zeros(2))
    odict._metadata = collections.OrderedDict({"": {"version": 1}})
    state = {
        "step": 3,
        "big": 2**60,
        "lr": 1.0,
        "nan": math.nan,
        "betas": (0.9, 0.999),
        "raw": b"\0\1",
        "model": odict,
        "ids": {0: "a"},
        "array": np.zeros(1, ">f4"),
        "seed": np.uint8(7),
        "shape": torch.Size([2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    metadata = {"_metadata": {"$odict": {"": {"version": 1}}}}
    assert json.loads(_encode.encode(state).tree) == {
        "step": 3,
        "big": {"$int": "1152921504606846976"},
        "lr": 1.0,
        "nan": {"$float": "nan"},
        "betas": {"$tuple": [0.9, 0.999]},
        "raw": {"$bytes": "AAE="},
        "model": {"$odict": {"w": {"$tensor": "model.w"}}, "attrs": metadata},
        "ids": {"$dict": [[0, "a"]]},
        "array": {"$ndarray": "array", "dtype": ">f4"},
        "seed": {"$scalar": "|u1", "data": "Bw=="},
        "shape": {"$size": [2]},
        "dtype": {"$dtype": "bfloat16"},
        "device": {"$device": "cpu"},
    }


def test_floats_are_never_mistaken_for_ints():
    tree = _encode.encode({"x": [1.0, 1e16, 1e300, -0.0]}).tree
    assert tree == '{"x":[1.0,1e+16,1e+300,-0.0]}'


def test_names_that_collide_get_a_suffix():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    encoded = _encode.encode({"x": {"y": a}, "x.y": b, "x.y#2": c})
    assert [spec[0] for spec in encoded.tensors] == ["x.y", "x.y#2", "x.y#2#2"]


def test_tied_tensors_are_stored_once_and_tied_again():
    weight = torch.arange(6.0).view(2, 3)
    state = {"a": weight, "b": [weight], "c": torch.nn.Parameter(weight), "view": weight[0]}
    assert [spec[0] for spec in _encode.encode(state).tensors] == ["a", "view"]
    back = codec(state)
    assert back["a"] is not back["b"][0]
    back["a"][0, 0] = 7
    assert back["b"][0][0, 0] == back["c"][0, 0] == 7
    assert back["a"].untyped_storage()._cdata == back["c"].untyped_storage()._cdata


def test_loaded_slice_has_its_own_storage():
    big = torch.arange(1000.0)
    back = codec({"part": big[10:12]})
    assert back["part"].untyped_storage().nbytes() == 8


def test_parameters_and_subclasses_come_back_as_plain_tensors():
    state = {"p": torch.nn.Parameter(torch.ones(2)), "s": torch.ones(2).as_subclass(Watched)}
    back = codec(state)
    for tensor in back.values():
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert not tensor._is_view()
        assert tensor.tolist() == [1, 1]


def test_a_swapped_out_parameter_stays_in_memory():
    parameter = torch.nn.Parameter(torch.full((1000,), 5.0))
    encoded = _encode.encode({"p": parameter})
    address = parameter.data_ptr()
    parameter.data = torch.zeros(3)
    assert torch.full((1000,), 1.0).data_ptr() != address
    assert encoded.tensors[0][1][-1].data_ptr() == address


FLAT = torch.arange(6.0)
MOVED = collections.OrderedDict(a=1, b=2)
MOVED.move_to_end("a")
SHARED = [1, 2]
COUNTS = collections.Counter({"a": 2**80, 2**70: 1, 0.5: math.inf})
# States, and the number of their tensors.
EQUAL = {
    "keys of two types": ({"s": {0: torch.zeros(1), "0": torch.ones(1)}}, 2),
    "one address, other shapes": (
        {"flat": FLAT, "square": FLAT.view(2, 3), "bits": FLAT.view(torch.int32)},
        3,
    ),
    "no elements": ({"a": torch.empty(0), "b": torch.empty(0)}, 2),
    "a container twice": ({"a": SHARED, "b": SHARED}, 0),
    "a changed order": ({"x": MOVED}, 0),
    "large and endless counts": ({"x": COUNTS}, 0),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_state_comes_back_equal_and_what_is_not_tied_is_not(name):
    state, count = EQUAL[name]
    assert_same(codec(state), state)
    assert len(_encode.encode(state).tensors) == count


never = classmethod(raising(AssertionError("a save must not run a sub-class's code")))
Watched = type("Watched", (torch.Tensor,), {"__torch_function__": never})
DTensor = type("DTensor", (torch.Tensor,), {"__torch_dispatch__": never})


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_note():
    odict = collections.OrderedDict()
    odict.note = "lost?"
    return odict


REFUSED = [
    (
        lambda: {"a": {"f": lambda: 1}},
        InvalidStateError,
        r"a\['f'\] is a function.*can't be pickled",
    ),
    (
        lambda: {"a": torch.Tensor._make_wrapper_subclass(DTensor, (2,))},
        UnsupportedError,
        "ringstow.dcp.StorageWriter",
    ),
    (lambda: {"a": freed()}, InvalidStateError, "^a has no memory: it needs 16 bytes"),
    (lambda: {"a": {torch.ones(1): 1}}, InvalidStateError, "^a has a tensor as a key"),
    (lambda: {"a": {(1, ("x", torch.ones(1))): 1}}, InvalidStateError, "^a has a tensor as a key"),
    (lambda: {"a": ["\ud800"]}, InvalidStateError, "^a.*surrogate"),
    (lambda: {"a": {"\ud800": 1}}, InvalidStateError, "^a.*surrogate"),
    (lambda: {"a": {1: {"\ud800": 1}}}, InvalidStateError, "^a.*surrogate"),
    (lambda: {"a": with_note()}, InvalidStateError, "^a is an OrderedDict.*'note'"),
    (lambda: [], InvalidStateError, "must be a dict"),
    (lambda: None, InvalidStateError, "must be a dict"),
    (lambda: torch.ones(1), InvalidStateError, "must be a dict"),
    (lambda: collections.defaultdict(int), InvalidStateError, "must be a dict"),
    pytest.param(
        *(lambda: {"a": [torch.empty((), dtype=FLOAT4)]}, UnsupportedError, r"a\[0\].*reshape"),
        marks=pytest.mark.skipif(FLOAT4 is None, reason="torch without 4-bit floats"),
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "said"), REFUSED, ids=lambda each: getattr(each, "__name__", each)[:40]
)
def test_what_cannot_be_saved_is_named_with_a_remedy(make, error, said):
    for allow_pickle in (True, False) if "pickled" not in said else (True,):
        with pytest.raises(error, match=said):
            _encode.encode(make(), allow_pickle=allow_pickle)


def codec_of_tree(tree):
    contents = _build.Contents("/ckpt", {}.get)
    skeleton = _skeleton.parse(tree, "/ckpt")
    _build.Survey(contents).add(skeleton)
    return _build.Builder(contents, {}).value(skeleton)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {0: v}])
def test_nesting_beyond_the_limit_is_refused(wrap):
    state = 1
    for _ in range(_skeleton.DEPTH_MAX - 1):
        state = wrap(state)
    assert_same(codec({"a": state}), {"a": state})
    with pytest.raises(InvalidStateError, match="^a.*200 levels"):
        _encode.encode({"a": wrap(state)})


@pytest.mark.parametrize("wrap", ["[value]", "(value,)", "{'k': value}", "{1: value}"])
def test_nesting_up_to_the_limit_needs_no_large_stack(wrap):
    # In its own process, because a stack overflow would kill it.
    program = f"""
import threading
from ringstow._state.tree import _encode, _skeleton
value = 1
for _ in range(_skeleton.DEPTH_MAX - 1):
    value = {wrap}
threading.stack_size(256 << 10)
thread = threading.Thread(target=_encode.encode, args=({{"a": value}},))
thread.start()
thread.join()
"""
    python(program, check=True)


@pytest.mark.parametrize(
    "tree",
    [
        *("", "[]", "1", '{"a":', '{"a":NaN}', '{"a":1,"a":2}', '{"a":{"$new":1}}'),
        *('{"a":{"$int":1}}', '{"a":{"$int":"1e5"}}', '{"a":{"$int":"' + "9" * 100_000 + '"}}'),
        '{"a":' + "9" * 100_000 + "}",
        '{"a":{"$float":"1.0"}}',
        '{"a":{"$bytes":"!"}}',
        '{"a":{"$bytes":"A"}}',
        '{"a":{"$tuple":1}}',
        '{"a":{"$tuple":[],"more":1}}',
        '{"a":{"$dict":{}}}',
        '{"a":{"$dict":[1]}}',
        '{"a":{"$dict":[[1]]}}',
        '{"a":{"$dict":[[[],1]]}}',
        '{"a":{"$dict":[[{"$tuple":[[]]},1]]}}',
        '{"a":{"$dict":[[1,1],[1,2]]}}',
        '{"a":{"$odict":5}}',
        '{"a":{"$odict":{"$int":"5"}}}',
        '{"a":{"$odict":{},"attrs":{"items":1}}}',
        '{"a":{"$tensor":1}}',
        '{"a":{"$tensor":"nowhere"}}',
        '{"a":{"$ndarray":"x","dtype":"O"}}',
        '{"a":{"$ndarray":"x"}}',
        '{"a":{"$scalar":"|O8","data":"AAAAAAAAAAA="}}',
        '{"a":{"$scalar":"<f8","data":"AAAA"}}',
        '{"a":{"$size":["x"]}}',
        '{"a":{"$pickle":1}}',
        '{"a":{"$set":{}}}',
        '{"a":{"$dict":[[{"$set":[]},1]]}}',
        '{"a":{"$deque":[1,2],"maxlen":1}}',
        '{"a":{"$deque":[],"maxlen":-1}}',
        '{"a":{"$defaultdict":{},"factory":"eval"}}',
        '{"a":{"$defaultdict":1,"factory":"int"}}',
        '{"a":{"$dataclass":"a:B"}}',
        '{"a":{"$dataclass":1,"fields":{}}}',
        '{"a":{"$namespace":"os.environ","fields":{}}}',
        '{"a":{"$enum":"a:B"}}',
        '{"a":{"$str":"x"}}',
        '{"a":{"$value":"os.system","args":["true"]}}',
        '{"a":{"$value":"builtins.bytearray","args":[1000000000000]}}',
        '{"a":{"$value":"builtins.complex","args":["1",2.0]}}',
        '{"a":{"$value":"builtins.range","args":[1,2,0]}}',
        '{"a":{"$value":"datetime.timedelta","args":[1000000000000,0,0]}}',
        '{"a":{"$value":"datetime.datetime","args":["x",null,0]}}',
        '{"a":{"$value":"datetime.datetime","args":["2020-01-01T00:00:00",5,0]}}',
        '{"a":{"$value":"numpy.dtype","args":["O"]}}',
        '{"a":{"$value":"torch.layout","args":[]}}',
        '{"a":{"$set":[[1]]}}',
        '{"a":{"$dict":[[{"$counter":[]},1]]}}',
        '{"a":{"$dict":[[{"$tuple":[1,{"$counter":[]}]},1]]}}',
        '{"a":{"$dict":[[{"$frozenset":[{"$counter":[]}]},1]]}}',
        '{"a":{"$dict":[[{"$ndarray":"x","dtype":"<f4"},1]]}}',
        '{"a":{"$dict":[[{"$tensor":"x"},1]]}}',
        '{"a":{"$dict":[[{"$dtype":"float32"},1],[{"$dtype":"float32"},2]]}}',
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":' * 600 + "1" + "}" * 600,
        '{"a":' + '{"$dict":[[' * 200 + "1" + ",1]]}" * 200 + "}",
    ],
    ids=lambda tree: tree[:40],
)
def test_a_tree_that_ringstow_never_wrote_is_a_format_error(tree):
    with pytest.raises(FormatError, match=r"/ckpt/manifest\.json") as caught:
        codec_of_tree(tree)
    assert caught.value.path == "/ckpt/manifest.json"


@pytest.mark.parametrize("tree", ['{"a":{"$dtype":"save"}}', '{"a":{"$device":"no such"}}'])
def test_dtype_or_device_unknown_to_torch_is_unsupported(tree):
    with pytest.raises(UnsupportedError, match="^a: torch"):
        codec_of_tree(tree)
