"""Values in files of torch.save that need care: as they were saved, or refused with their key."""

import numpy as np
import pytest
import torch
from support import assert_same

import ringstow
from ringstow._foreign import _nested_states
from ringstow.convert import convert

TARGETS = ("ringstow", "torch", "dcp", "hf")


def saved(at, state):
    torch.save(state, at / "x.pt")
    return at / "x.pt"


def refused_by_all(at, path, kind, match):
    """Assert that loads and conversions say why they do not read a file."""
    with pytest.raises(kind, match=match):
        ringstow.load(path)
    for target in TARGETS:
        with pytest.raises(kind, match=match):
            convert(path, at / target, target=target)
        assert not (at / target).exists()


def as_written(path, target):
    return torch.load(path) if target == "torch" else ringstow.load(path)


# numpy's dtypes


DTYPES = {
    "plain": np.dtype("f4"),
    "big-endian": np.dtype(">i8"),
    "in a list": [np.dtype("u1"), [np.dtype("u1")]],
    "in a tuple": ({"shape": (3,), "dtype": np.dtype("c8")},),
    "in a set": {np.dtype("f8"), (np.dtype("i2"), 1)},
    "as a key": {"first": 1, np.dtype("f2"): 2, (np.dtype("?"), "k"): np.dtype("i4"), "last": 3},
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_of_numpy_loads_and_converts_as_it_was_saved(at, name):
    path = saved(at, {"v": DTYPES[name], "w": torch.ones(2)})
    assert_same(ringstow.load(path)["v"], DTYPES[name])
    with ringstow.open(path) as opened:
        assert_same(opened.value("v") if name != "as a key" else opened.tree["v"], DTYPES[name])
    convert(path, at / "ckpt")
    assert_same(ringstow.load(at / "ckpt")["v"], DTYPES[name])


class Space:
    """A class that the program lets torch unpickle, with a dtype among its attributes."""

    def __init__(self):
        self.dtype = np.dtype("f4")


def test_a_dtype_in_an_object_that_the_program_allows_is_the_real_one(at):
    path = saved(at, {"space": Space()})
    with torch.serialization.safe_globals([Space]):
        assert ringstow.load(path)["space"].dtype == np.dtype("f4")


def test_a_dtype_that_is_not_plain_is_refused_by_name(at):
    path = saved(at, {"v": np.dtype("M8[s]")})
    refused_by_all(at, path, ringstow.UnsupportedError, "dtype that is not plain: 'M8'")


# Views that torch only marks


def views():
    complex_, real = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    conj = complex_.conj()
    neg = torch._neg_view(real)  # as the imaginary part of a conjugated view is
    return {"complex": complex_, "conj": conj, "tied": conj, "real": real, "neg": neg}


@pytest.mark.parametrize("target", TARGETS)
def test_conjugated_and_negated_views_convert_to_their_elements(at, target):
    state = views()
    convert(saved(at, state), at / "to", target=target)
    found = as_written(at / "to", target)
    for name, one in state.items():
        if target != "hf" or name != "tied":
            assert torch.equal(found[name].resolve_conj(), one.resolve_conj().resolve_neg()), name


def test_a_negated_view_is_another_tensor_than_what_it_negates(at):
    state = views()
    found = ringstow.load(saved(at, state))
    assert torch.equal(found["neg"], state["neg"].resolve_neg())
    assert torch.equal(found["real"], state["real"])


# Values in themselves, and values without end


def in_itself(kind):
    held = {"dict": {}, "list": []}[kind]
    held.update(me=held) if kind == "dict" else held.append(held)
    return {"model": {"w": torch.ones(2)}, "held": {"it": held}}


@pytest.mark.parametrize(("kind", "key"), [("dict", r"\['me'\]"), ("list", r"\[0\]")])
def test_a_value_in_itself_is_named(at, kind, key):
    path = saved(at, in_itself(kind))
    match = rf"x\.pt: held\['it'\]{key} contains itself: load it with torch.load"
    refused_by_all(at, path, ringstow.FormatError, match)


def test_values_without_end_are_refused_at_once(at):
    node = [torch.ones(1)]
    for _ in range(60):
        node = [node, node]
    refused_by_all(at, saved(at, {"v": node}), ringstow.FormatError, "so often that a copy")


def test_values_nested_too_deep_are_named(at):
    node = 1
    for _ in range(250):
        node = [node]
    refused_by_all(at, saved(at, {"v": node}), ringstow.FormatError, r"v\[0\].* is nested more")


def test_many_references_to_one_value_are_no_values_without_end(at):
    shared = {"a": [1, 2, 3]}
    state = {"v": [shared] * 20_000, "w": torch.ones(1)}
    assert ringstow.load(saved(at, state))["v"] == state["v"]
    _nested_states.check(str(at / "x.pt"), {"v": [None] * 50_000})


# Text that is not Unicode


@pytest.mark.parametrize("name", ["a\ud800", "\udc80"])
@pytest.mark.parametrize("top", ["", "m"])
def test_a_name_that_is_not_unicode_is_named(at, name, top):
    inner = {name: torch.ones(1)}
    path = saved(at, {top: inner} if top else inner)
    for target in ("ringstow", "hf"):
        with pytest.raises(ringstow.InvalidStateError, match="not valid Unicode") as caught:
            convert(path, at / target, target=target)
        assert str(caught.value).encode()  # what a terminal can show
        assert repr(name)[1:-1] in str(caught.value)
    for target in ("torch", "dcp"):
        convert(path, at / target, target=target)
        assert_same(ringstow.load(at / target), ringstow.load(path))


def test_arrays_convert_to_dcp(at):
    path = saved(at, {"a": np.arange(3.0), "empty": {}, "w": torch.ones(2)})
    assert convert(path, at / "dcp", target="dcp").left_out == ("empty",)
    assert_same(ringstow.load(at / "dcp")["a"], np.arange(3.0))
