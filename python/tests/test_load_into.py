"""Loading into existing tensors: in place, all or nothing, with one error for all mismatches."""

import collections

import numpy as np
import pytest
import torch
from support import assert_same
from test_round_trip import trained

import ringstow

# A value that the format cannot represent.
ODD = np.datetime64("2020-01-01")


def saved(state, tmp_path, **options):
    ringstow.save(state, tmp_path / "c", **options)
    return tmp_path / "c"


def mismatch(into, path, match=None, **options):
    """Return the error of a load into a state that does not fit."""
    with pytest.raises(ringstow.KeyMismatchError, match=match) as caught:
        ringstow.load_into(into, path, **options)
    return caught.value


def module(fill):
    made = collections.OrderedDict(w=torch.full((1,), float(fill)))
    made._metadata = collections.OrderedDict({"": {"version": fill}})
    return made


def scheduler(milestones):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones).state_dict()


WEIGHT = torch.arange(4.0)
ONES = torch.ones(2)
# What is saved, what it is loaded into, and what is there then unless it is what was saved.
FILLED = {
    "values": (
        {"w": torch.ones(3), "a": np.ones(2), "step": 5, "names": ["x", "y"]},
        lambda: {"w": torch.zeros(3), "a": np.zeros(2), "step": 0, "names": []},
    ),
    "conjugated": (
        {"z": torch.tensor([1 + 2j])},
        lambda: {"z": torch.zeros(1, dtype=torch.complex64).conj()},
    ),
    "other byte orders": (
        {"big": np.arange(3, dtype=">i4"), "little": np.arange(3, dtype="<i4")},
        lambda: {"big": np.zeros(3, "<i4"), "little": np.zeros(3, ">i4")},
        {"big": np.arange(3, dtype="<i4"), "little": np.arange(3, dtype=">i4")},
    ),
    "tied in the checkpoint only": (
        {"a": WEIGHT, "b": WEIGHT},
        lambda: {"a": torch.zeros(4), "b": torch.zeros(4)},
    ),
    "tied, and equal in the checkpoint": (
        {"a": WEIGHT, "b": WEIGHT.clone()},
        lambda: dict.fromkeys("ab", torch.zeros(4)),
    ),
    "None": ({"s": {0: {"momentum": ONES}}}, lambda: {"s": {0: {"momentum": None}}}),
    "keys that are dtypes": (
        {"d": {torch.float16: ONES}},
        lambda: {"d": {torch.float16: torch.zeros(2)}},
    ),
    "metadata": ({"m": module(2)}, lambda: {"m": module(1)}),
    "no elements": (
        {"e": torch.empty(2, 0), "f": torch.empty(0)},
        lambda: {"e": torch.empty(2, 0), "f": torch.empty(0)},
    ),
    "a scheduler's counter": (
        {"sched": scheduler([3, 5])},
        lambda: {"sched": scheduler([7])},
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_what_is_there_is_filled_or_replaced(name, tmp_path):
    there, here, *expected = FILLED[name]
    path, state = saved(there, tmp_path), here()
    kept = {key: one for key, one in state.items() if isinstance(one, (torch.Tensor, np.ndarray))}
    report = ringstow.load_into(state, path)
    assert_same(state, *expected or [there])
    assert all(state[key] is one for key, one in kept.items())
    if name == "values":
        assert (report.tensors, report.tensor_bytes) == (2, 28)


def test_a_model_and_an_optimizer_resume_in_place(tmp_path):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    path = saved(state, tmp_path)

    other, other_optimizer = trained(seed=1)
    into = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict(), "step": 0}
    ringstow.load_into(into, path)
    assert_same(into, state)
    assert_same(other.state_dict(), model.state_dict())  # the model's own tensors were filled


def test_targets_that_are_not_dense_are_filled(tmp_path):
    source = torch.arange(12.0).view(3, 4)
    path = saved({"t": source, "s": source, "p": source, "n": np.arange(6)}, tmp_path)
    wide = np.zeros(12, int)
    big = torch.zeros(6, 8)
    state = {
        "t": torch.zeros(4, 3).t(),
        "s": big[::2, ::2],
        "p": torch.nn.Parameter(torch.zeros(3, 4)),
        "n": wide[::2],
    }
    ringstow.load_into(state, path)
    for name in "tsp":
        assert torch.equal(state[name], source), name
    assert big.sum() == source.sum()
    assert wide.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert state["p"].requires_grad
    assert state["p"].is_leaf


def test_tied_targets_are_filled_once(tmp_path):
    path = saved({"a": WEIGHT, "b": WEIGHT}, tmp_path)
    state = dict.fromkeys("ab", torch.zeros(4))
    assert ringstow.load_into(state, path).tensor_bytes == 16
    assert torch.equal(state["a"], WEIGHT)


def test_tied_targets_refuse_two_tensors_that_differ(tmp_path):
    path = saved({"a": torch.zeros(4), "n": {"b": torch.ones(4)}, "c": torch.ones(4)}, tmp_path)
    target, c = torch.full((4,), 9.0), torch.zeros(4)
    said = r"a and n\.b are one tensor here and two"
    mismatch({"a": target, "n": {"b": target}, "c": c}, path, said)
    assert target.tolist() == [9, 9, 9, 9]
    assert c.tolist() == [0, 0, 0, 0]


def test_tied_targets_of_two_dtypes_take_tensors_of_equal_bytes(tmp_path):
    weight = torch.arange(4.0)
    state = {"w": weight, "bits": weight.view(torch.int32)}
    path = saved(state, tmp_path)
    weight.zero_()
    ringstow.load_into(state, path)
    assert torch.equal(weight, WEIGHT)


def test_autograd_notices_the_change(tmp_path):
    path = saved({"w": torch.ones(3)}, tmp_path)
    w = torch.full((3,), 2.0, requires_grad=True)
    loss = (w * w).sum()
    ringstow.load_into({"w": w}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_misfit_is_named_and_nothing_changed(tmp_path):
    there = {
        "same": ONES,
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.float64),
        "kind": {"a": torch.ones(1)},
        "only": {"there": torch.ones(1), "too": 1},
        "step": 9,
    }
    state = {
        "same": torch.zeros(2),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(2),
        "kind": np.zeros(1, np.float32),
        "here": [torch.zeros(1)],
        "step": 0,
    }
    error = mismatch(state, saved(there, tmp_path))
    assert (error.missing, error.unexpected) == (["here.0"], ["only.there", "only.too"])
    assert [sentence.split()[0] for sentence in error.mismatched] == ["shape", "dtype", "kind"]
    assert "F32 [4] here and F32 [3] in the checkpoint" in error.mismatched[0]
    for name in ["here.0", "only.there", "shape", "dtype", "kind", "strict=False"]:
        assert name in str(error)
    assert state["same"].tolist() == [0, 0]
    assert state["step"] == 0


def test_not_strict_loads_common_keys_and_still_checks_shapes(tmp_path):
    path = saved({"a": ONES, "b": ONES, "n": {"x": 1, "y": 2}}, tmp_path)
    state = {"a": torch.zeros(2), "c": torch.zeros(2), "n": {"x": 0, "z": 0}}
    ringstow.load_into(state, path, strict=False)
    assert_same(state, {"a": ONES, "c": torch.zeros(2), "n": {"x": 1, "z": 0}})
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    mismatch(state, path, "different", strict=False)
    assert state["a"].tolist() == [0, 0]


@pytest.mark.parametrize("value", [5, 0.5, "text", (1, 2), [1]], ids=str)
@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_value_and_tensor_never_fill_each_other(tmp_path, value, kind):
    state = {"x": value}
    mismatch(state, saved({"x": kind(2)}, tmp_path), "x is a value .* here and a ")
    assert state == {"x": value}
    other = saved({"x": value}, tmp_path / "other")
    mismatch({"x": kind(2)}, other, "x is a .* in the checkpoint")


def test_tuples_that_hold_tensors_are_filled_and_rebuilt(tmp_path):
    there = {"t": (torch.ones(1), 5, [ONES])}
    first, last = torch.zeros(1), torch.zeros(2)
    state = {"t": (first, 0, [last])}
    ringstow.load_into(state, saved(there, tmp_path))
    assert state["t"][0] is first
    assert state["t"][2][0] is last
    assert_same(state, there)


def test_tensor_sequences_of_other_length_mismatch(tmp_path):
    path = saved({"l": [torch.ones(1), torch.ones(1)]}, tmp_path)
    state = {"l": [torch.zeros(1)]}
    assert mismatch(state, path).unexpected == ["l.1"]
    ringstow.load_into(state, path, strict=False)
    assert state["l"][0].tolist() == [1]


def test_expanded_and_read_only_targets_are_refused(tmp_path):
    path = saved({"e": torch.ones(2, 2), "r": np.ones(2)}, tmp_path)
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    error = mismatch({"e": torch.zeros(1, 2).expand(2, 2), "r": frozen}, path)
    assert len(error.mismatched) == 2


def test_targets_without_memory_are_refused(tmp_path):
    path = saved({"m": ONES}, tmp_path)
    with pytest.raises(ringstow.UnsupportedError, match="^m is on the meta device"):
        ringstow.load_into({"m": torch.ones(2, device="meta")}, path)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ringstow.InvalidStateError, match="^m has no memory"):
        ringstow.load_into({"m": freed}, path)


def test_pickled_values_need_allow_pickle(tmp_path):
    there = {"w": torch.ones(1), "odd": ODD}
    path = saved(there, tmp_path, allow_pickle=True)
    state = {"w": torch.zeros(1), "odd": None}
    with pytest.raises(ringstow.UnsupportedError, match="^odd .*allow_pickle=True"):
        ringstow.load_into(state, path)
    assert state["w"].tolist() == [0]
    ringstow.load_into(state, path, allow_pickle=True)
    assert_same(state, there)


def test_only_a_dict_can_be_filled(tmp_path):
    path = saved({}, tmp_path)
    with pytest.raises(ringstow.InvalidStateError, match="must be a dict, not list"):
        ringstow.load_into([], path)


def test_left_out_names_keep_their_order(tmp_path):
    there = [f"there{i}" for i in (3, 1, 2, 9, 4)]
    here = [f"here{i}" for i in (5, 2, 8, 1, 7)]
    path = saved({"a": torch.ones(1), **dict.fromkeys(there, 0)}, tmp_path)
    state = {"a": torch.zeros(1), **dict.fromkeys(here, 0)}
    report = ringstow.load_into(state, path, strict=False)
    assert (report.missing, report.unexpected) == (tuple(here), tuple(there))
    assert state["a"].tolist() == [1]
    error = mismatch(state, path)
    assert (error.missing, error.unexpected) == (here, there)


def test_key_mismatch_is_a_readable_key_error():
    error = ringstow.KeyMismatchError("x does not fit")
    assert isinstance(error, KeyError)
    assert str(error) == "x does not fit"


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float16),
        (torch.complex128, torch.complex64),
    ],
)
def test_cast_converts_between_precisions(tmp_path, there, here):
    values = torch.tensor([[1.0, -2.5], [0.0, 3.0]]).to(there)
    path = saved({"w": values, "same": ONES}, tmp_path)
    state = {"w": torch.zeros(2, 2, dtype=here), "same": torch.zeros(2)}
    mismatch(state, path, "cast=True")
    assert state["w"].count_nonzero() == 0
    w = state["w"]
    ringstow.load_into(state, path, cast=True)
    assert state["w"] is w
    assert_same(state, {"w": values.to(here), "same": ONES})


def test_cast_fills_tied_and_strided_targets(tmp_path):
    path = saved({"a": WEIGHT, "b": WEIGHT + 1}, tmp_path)
    tied = torch.zeros(4, dtype=torch.bfloat16)
    big = torch.zeros(8, dtype=torch.float64)
    ringstow.load_into({"a": tied, "b": big[::2]}, path, cast=True)
    assert tied.tolist() == [0, 1, 2, 3]
    assert big.tolist() == [1, 0, 2, 0, 3, 0, 4, 0]


@pytest.mark.parametrize(
    ("there", "here"), [(torch.int64, torch.int32), (torch.float32, torch.int64)]
)
def test_cast_refuses_other_kinds_of_numbers(tmp_path, there, here):
    path = saved({"w": torch.ones(2, dtype=there)}, tmp_path)
    error = mismatch({"w": torch.zeros(2, dtype=here)}, path, "different", cast=True)
    assert "cast=" not in str(error)
