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


def test_tensors_are_filled_in_place_and_values_replaced(tmp_path):
    path = saved({"w": torch.ones(3), "a": np.ones(2), "step": 5, "names": ["x", "y"]}, tmp_path)
    w, a = torch.zeros(3), np.zeros(2)
    state = {"w": w, "a": a, "step": 0, "names": []}
    report = ringstow.load_into(state, path)
    assert state["w"] is w
    assert state["a"] is a
    assert_same(state, {"w": torch.ones(3), "a": np.ones(2), "step": 5, "names": ["x", "y"]})
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


def test_conjugated_targets_are_filled(tmp_path):
    source = torch.tensor([1 + 2j])
    path = saved({"z": source}, tmp_path)
    state = {"z": torch.zeros(1, dtype=torch.complex64).conj()}
    ringstow.load_into(state, path)
    assert torch.equal(state["z"], source)


def test_other_byte_orders_are_filled(tmp_path):
    path = saved({"big": np.arange(3, dtype=">i4"), "little": np.arange(3, dtype="<i4")}, tmp_path)
    state = {"big": np.zeros(3, "<i4"), "little": np.zeros(3, ">i4")}
    ringstow.load_into(state, path)
    assert state["big"].tolist() == state["little"].tolist() == [0, 1, 2]
    assert state["little"].dtype.str == ">i4"


def test_tied_targets_are_filled_once(tmp_path):
    weight = torch.arange(4.0)
    path = saved({"a": weight, "b": weight}, tmp_path)
    target = torch.zeros(4)
    report = ringstow.load_into({"a": target, "b": target}, path)
    assert torch.equal(target, weight)
    assert report.tensor_bytes == 16


def test_tied_in_checkpoint_only(tmp_path):
    weight = torch.arange(4.0)
    path = saved({"a": weight, "b": weight}, tmp_path)
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    ringstow.load_into(state, path)
    assert torch.equal(state["a"], weight)
    assert torch.equal(state["b"], weight)


def test_tied_targets_refuse_two_tensors_that_differ(tmp_path):
    path = saved({"a": torch.zeros(4), "n": {"b": torch.ones(4)}, "c": torch.ones(4)}, tmp_path)
    target, c = torch.full((4,), 9.0), torch.zeros(4)
    with pytest.raises(ringstow.KeyMismatchError, match=r"a and n\.b are one tensor here and two"):
        ringstow.load_into({"a": target, "n": {"b": target}, "c": c}, path)
    assert target.tolist() == [9, 9, 9, 9]
    assert c.tolist() == [0, 0, 0, 0]


def test_tied_targets_take_two_tensors_that_are_equal(tmp_path):
    value = torch.arange(4.0)
    path = saved({"a": value, "b": value.clone()}, tmp_path)
    target = torch.zeros(4)
    ringstow.load_into({"a": target, "b": target}, path)
    assert torch.equal(target, value)


def test_tied_targets_of_two_dtypes_take_tensors_of_equal_bytes(tmp_path):
    weight = torch.arange(4.0)
    state = {"w": weight, "bits": weight.view(torch.int32)}
    path = saved(state, tmp_path)
    weight.zero_()
    ringstow.load_into(state, path)
    assert torch.equal(weight, torch.arange(4.0))


def test_autograd_notices_the_change(tmp_path):
    path = saved({"w": torch.ones(3)}, tmp_path)
    w = torch.full((3,), 2.0, requires_grad=True)
    loss = (w * w).sum()
    ringstow.load_into({"w": w}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_misfit_is_named_and_nothing_changed(tmp_path):
    saved_state = {
        "same": torch.ones(2),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.float64),
        "kind": {"a": torch.ones(1)},
        "only": {"there": torch.ones(1), "too": 1},
        "step": 9,
    }
    path = saved(saved_state, tmp_path)
    state = {
        "same": torch.zeros(2),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(2),
        "kind": np.zeros(1, np.float32),
        "here": [torch.zeros(1)],
        "step": 0,
    }
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(state, path)
    error = caught.value
    assert error.missing == ["here.0"]
    assert error.unexpected == ["only.there", "only.too"]
    assert [sentence.split()[0] for sentence in error.mismatched] == ["shape", "dtype", "kind"]
    assert "F32 [4] here and F32 [3] in the checkpoint" in error.mismatched[0]
    for name in ["here.0", "only.there", "shape", "dtype", "kind", "strict=False"]:
        assert name in str(error)
    assert state["same"].tolist() == [0, 0]
    assert state["step"] == 0


def test_not_strict_loads_common_keys(tmp_path):
    path = saved({"a": torch.ones(2), "b": torch.ones(2), "n": {"x": 1, "y": 2}}, tmp_path)
    state = {"a": torch.zeros(2), "c": torch.zeros(2), "n": {"x": 0, "z": 0}}
    ringstow.load_into(state, path, strict=False)
    assert_same(state, {"a": torch.ones(2), "c": torch.zeros(2), "n": {"x": 1, "z": 0}})


def test_not_strict_still_checks_shapes(tmp_path):
    path = saved({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ringstow.KeyMismatchError, match="different"):
        ringstow.load_into(state, path, strict=False)
    assert state["a"].tolist() == [0, 0]


def test_none_is_replaced_by_the_saved_tensor(tmp_path):
    path = saved({"s": {0: {"momentum": torch.ones(2)}}}, tmp_path)
    state = {"s": {0: {"momentum": None}}}
    ringstow.load_into(state, path)
    assert torch.equal(state["s"][0]["momentum"], torch.ones(2))


@pytest.mark.parametrize("value", [5, 0.5, "text", (1, 2), [1]], ids=str)
@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_value_and_tensor_never_fill_each_other(tmp_path, value, kind):
    path = saved({"x": kind(2)}, tmp_path)
    state = {"x": value}
    with pytest.raises(ringstow.KeyMismatchError, match="x is a value .* here and a "):
        ringstow.load_into(state, path)
    assert state == {"x": value}
    other = saved({"x": value}, tmp_path / "other")
    with pytest.raises(ringstow.KeyMismatchError, match="x is a .* in the checkpoint"):
        ringstow.load_into({"x": kind(2)}, other)


def test_tuples_that_hold_tensors_are_filled_and_rebuilt(tmp_path):
    path = saved({"t": (torch.ones(1), 5, [torch.ones(2)])}, tmp_path)
    first, last = torch.zeros(1), torch.zeros(2)
    state = {"t": (first, 0, [last])}
    ringstow.load_into(state, path)
    assert state["t"][0] is first
    assert state["t"][2][0] is last
    assert_same(state, {"t": (torch.ones(1), 5, [torch.ones(2)])})


def test_tensor_sequences_of_other_length_mismatch(tmp_path):
    path = saved({"l": [torch.ones(1), torch.ones(1)]}, tmp_path)
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into({"l": [torch.zeros(1)]}, path)
    assert caught.value.unexpected == ["l.1"]
    state = {"l": [torch.zeros(1)]}
    ringstow.load_into(state, path, strict=False)
    assert state["l"][0].tolist() == [1]


def test_keys_that_are_dtypes_are_matched(tmp_path):
    path = saved({"d": {torch.float16: torch.ones(1)}}, tmp_path)
    state = {"d": {torch.float16: torch.zeros(1)}}
    ringstow.load_into(state, path)
    assert state["d"][torch.float16].tolist() == [1]


def test_metadata_is_replaced(tmp_path):
    odict = collections.OrderedDict(w=torch.ones(1))
    odict._metadata = collections.OrderedDict({"": {"version": 2}})
    path = saved({"m": odict}, tmp_path)
    state = {"m": collections.OrderedDict(w=torch.zeros(1))}
    ringstow.load_into(state, path)
    assert_same(state, {"m": odict})


def test_expanded_and_read_only_targets_are_refused(tmp_path):
    path = saved({"e": torch.ones(2, 2), "r": np.ones(2)}, tmp_path)
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into({"e": torch.zeros(1, 2).expand(2, 2), "r": frozen}, path)
    assert len(caught.value.mismatched) == 2


def test_targets_without_memory_are_refused(tmp_path):
    path = saved({"m": torch.ones(2)}, tmp_path)
    with pytest.raises(ringstow.UnsupportedError, match="^m is on the meta device"):
        ringstow.load_into({"m": torch.ones(2, device="meta")}, path)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ringstow.InvalidStateError, match="^m has no memory"):
        ringstow.load_into({"m": freed}, path)


def test_pickled_values_need_allow_pickle(tmp_path):
    path = saved({"w": torch.ones(1), "odd": ODD}, tmp_path, allow_pickle=True)
    state = {"w": torch.zeros(1), "odd": None}
    with pytest.raises(ringstow.UnsupportedError, match="^odd .*allow_pickle=True"):
        ringstow.load_into(state, path)
    assert state["w"].tolist() == [0]
    ringstow.load_into(state, path, allow_pickle=True)
    assert_same(state, {"w": torch.ones(1), "odd": ODD})


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_tensors_fit(shape, tmp_path):
    path = saved({"e": torch.empty(shape)}, tmp_path)
    ringstow.load_into({"e": torch.empty(shape)}, path)


def test_only_a_dict_can_be_filled(tmp_path):
    path = saved({}, tmp_path)
    with pytest.raises(ringstow.InvalidStateError, match="must be a dict, not list"):
        ringstow.load_into([], path)


def test_a_schedulers_counter_is_replaced_as_one_value(tmp_path):
    def scheduler():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])

    ringstow.save({"sched": scheduler().state_dict()}, tmp_path / "c")
    into = {"sched": scheduler().state_dict()}
    into["sched"]["milestones"] = collections.Counter([7])
    ringstow.load_into(into, tmp_path / "c")
    assert into["sched"]["milestones"] == collections.Counter([3, 5])
    assert type(into["sched"]["milestones"]) is collections.Counter


def test_left_out_names_keep_their_order(tmp_path):
    there = [f"there{i}" for i in (3, 1, 2, 9, 4)]
    here = [f"here{i}" for i in (5, 2, 8, 1, 7)]
    path = saved({"a": torch.ones(1), **dict.fromkeys(there, 0)}, tmp_path)
    state = {"a": torch.zeros(1), **dict.fromkeys(here, 0)}
    report = ringstow.load_into(state, path, strict=False)
    assert (report.missing, report.unexpected) == (tuple(here), tuple(there))
    assert state["a"].tolist() == [1]
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(state, path)
    assert (caught.value.missing, caught.value.unexpected) == (here, there)


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
    path = saved({"w": values, "same": torch.ones(2)}, tmp_path)
    state = {"w": torch.zeros(2, 2, dtype=here), "same": torch.zeros(2)}
    with pytest.raises(ringstow.KeyMismatchError, match="cast=True"):
        ringstow.load_into(state, path)
    assert state["w"].count_nonzero() == 0
    w = state["w"]
    ringstow.load_into(state, path, cast=True)
    assert state["w"] is w
    assert torch.equal(w, values.to(here))
    assert state["same"].tolist() == [1, 1]


def test_cast_fills_tied_and_strided_targets(tmp_path):
    path = saved({"a": torch.arange(4.0), "b": torch.arange(4.0) + 1}, tmp_path)
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
    with pytest.raises(ringstow.KeyMismatchError, match="different") as caught:
        ringstow.load_into({"w": torch.zeros(2, dtype=here)}, path, cast=True)
    assert "cast=" not in str(caught.value)
