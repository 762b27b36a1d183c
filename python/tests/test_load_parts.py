"""A load by prefix or by names gives the same structure with the selected leaves only."""

import collections

import numpy as np
import pytest
import torch
from support import assert_same

import ringstow

# A value that the format cannot represent.
ODD = np.datetime64("2020-01-01")


@pytest.fixture
def state():
    model = collections.OrderedDict(
        {f"layers.{i}.weight": torch.full((4,), float(i)) for i in range(12)}
    )
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    return {
        "model": model,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
        },
        "tied": model["layers.0.weight"],
        "pair": (torch.ones(2), {"note": "whole"}),
        "empty": {},
        "step": 7,
    }


@pytest.fixture
def path(state, tmp_path):
    ringstow.save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("prefix", ["model.layers.1", "model.layers.1."])
def test_a_prefix_ends_at_a_dot(path, state, prefix):
    back = ringstow.load(path, prefix=prefix)
    name = "layers.1.weight"
    expected = collections.OrderedDict({name: state["model"][name]})
    expected._metadata = state["model"]._metadata
    assert_same(back, {"model": expected})


def test_prefix_excludes_names_with_a_common_start(tmp_path):
    state = {"model": {"w": torch.ones(1)}, "model_ema": {"w": torch.zeros(1)}, "model2": 3}
    ringstow.save(state, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c", prefix="model"), {"model": state["model"]})
    assert ringstow.load(tmp_path / "c", prefix="model2") == {"model2": 3}
    with pytest.raises(ringstow.KeyMismatchError, match="'mod'.*perhaps"):
        ringstow.load(tmp_path / "c", prefix="mod")


def test_keys_are_exact(path):
    back = ringstow.load(path, keys=["optimizer.state.1.step", "step"])
    assert_same(back, {"optimizer": {"state": {1: {"step": torch.tensor(4.0)}}}, "step": 7})


def test_order_is_the_checkpoints(path):
    assert list(ringstow.load(path, keys=["step", "tied"])) == ["tied", "step"]


def test_lists_and_tuples_load_completely(path, state):
    groups = {"optimizer": {"param_groups": state["optimizer"]["param_groups"]}}
    of_list = [f"optimizer.param_groups.{number}.lr" for number in (0, 1)]
    assert_same(ringstow.load(path, keys=[of_list[1], "pair.0"]), groups | {"pair": state["pair"]})
    assert_same(ringstow.load(path, keys=of_list), groups)


def test_empty_containers_and_tied_tensors_are_found_by_their_own_names(path):
    assert ringstow.load(path, keys=["empty"]) == {"empty": {}}
    assert list(ringstow.load(path, keys=["tied"])) == ["tied"]
    assert list(ringstow.load(path, keys=["model.layers.0.weight"])) == ["model"]


def test_colliding_names_differ_by_suffix(tmp_path):
    state = {"x": {"y": torch.zeros(1)}, "x.y": torch.ones(1)}
    ringstow.save(state, tmp_path / "c")
    assert_same(ringstow.load(tmp_path / "c", keys=["x.y"]), {"x": state["x"]})
    assert_same(ringstow.load(tmp_path / "c", keys=["x.y#2"]), {"x.y": state["x.y"]})


def test_no_keys_load_nothing_and_empty_prefix_all(path, state):
    assert ringstow.load(path, keys=[]) == {}
    assert_same(ringstow.load(path, prefix=""), state)


def test_prefix_and_keys_exclude_each_other_and_keys_are_a_list(path):
    with pytest.raises(ValueError, match="not both"):
        ringstow.load(path, prefix="a", keys=["b"])
    with pytest.raises(TypeError, match=r"\[name\]"):
        ringstow.load(path, keys="step")


def test_every_missing_key_is_named_with_close_matches(path):
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load(path, keys=["stepp", "step", "model.layers.3.wieght", "zzz"])
    assert caught.value.missing == ["stepp", "model.layers.3.wieght", "zzz"]
    assert caught.value.path == str(path)
    message = str(caught.value)
    assert "(3)" in message
    assert "'step'" in message
    assert "'model.layers.3.weight'" in message


def test_group_name_as_key_gets_a_hint_and_unknown_prefixes_are_named(path):
    with pytest.raises(ringstow.KeyMismatchError, match=r"'optimizer' is a group.*'optimizer\.'"):
        ringstow.load(path, keys=["optimizer"])
    with pytest.raises(ringstow.KeyMismatchError, match=r"modell\.") as caught:
        ringstow.load(path, prefix="modell.")
    assert caught.value.missing == ["modell."]


def test_unselected_pickles_need_no_allow_pickle(tmp_path):
    state = {"a": torch.ones(1), "b": {"odd": ODD}}
    ringstow.save(state, tmp_path / "c", allow_pickle=True)
    assert ringstow.load(tmp_path / "c", keys=["a"])["a"].tolist() == [1]
    with pytest.raises(ringstow.UnsupportedError, match=r"b\['odd'\].*allow_pickle=True"):
        ringstow.load(tmp_path / "c")
    assert ringstow.load(tmp_path / "c", allow_pickle=True)["b"] == {"odd": ODD}


def test_load_reads_only_the_selected_bytes(tmp_path):
    state = {"big": torch.zeros(16 << 20), "small": torch.ones(1000)}
    ringstow.save(state, tmp_path / "c")
    reads = bytes_read_by(lambda: ringstow.load(tmp_path / "c", keys=["small"]))
    assert reads < 10 << 20  # a block of 4 MiB or two, and the manifest


def bytes_read_by(act):
    def read():
        with open("/proc/self/io") as file:
            return int(dict(line.split(": ") for line in file)["rchar"])

    before = read()
    act()
    return read() - before


def test_few_keys_parse_few_names(tmp_path, monkeypatch):
    state = {
        "model": {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(500)},
        "opt": {"state": {i: {"step": torch.tensor(i)} for i in range(500)}},
    }
    ringstow.save(state, tmp_path / "c")
    parsed, parse = [], ringstow._state.tree._skeleton.parse

    def measured(text, path):
        parsed.append(len(text))
        return parse(text, path)

    monkeypatch.setattr(ringstow._state.tree._skeleton, "parse", measured)
    back = ringstow.load(tmp_path / "c", keys=["model.layers.77.w", "opt.state.9.step"])
    assert_same(back["model"], {"layers.77.w": torch.full((2,), 77.0)})
    assert_same(back["opt"], {"state": {9: {"step": torch.tensor(9)}}})
    back = ringstow.load(tmp_path / "c", prefix="model.layers.3")
    assert_same(back, {"model": {"layers.3.w": torch.full((2,), 3.0)}})
    assert max(parsed) < 200
    with pytest.raises(ringstow.KeyMismatchError, match=r"perhaps 'model\.layers\.77\.w'"):
        ringstow.load(tmp_path / "c", keys=["model.layers.77.w", "model.layers.77.ww"])


@pytest.mark.parametrize(
    "keys", [["", ".x"], ["a..x"], ["True.x"], ["1.5"], ["a#2"], ["(1, 2).y"], ["d.x", "d"]]
)
def test_names_of_odd_keys_are_found(tmp_path, keys):
    state = {
        "": {"x": 1} if ".x" in keys and "" not in keys else 1,
        ".x": 2,
        "a": {"": {"x": 3}},
        True: {"x": 4},
        1.5: 5,
        "a#2": 6,
        (1, 2): {"y": 7},
        "d": collections.OrderedDict(x=8) if "d" not in keys else 9,
        "d.x": 10,
        "other": 0,
    }
    ringstow.save(state, tmp_path / "c")
    back = ringstow.load(tmp_path / "c", keys=keys)
    assert "other" not in back
    with ringstow.open(tmp_path / "c") as ckpt:
        for key in keys:
            assert ckpt.value(key) is not None
