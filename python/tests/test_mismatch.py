"""A state dict that does not fit: the error says why, and advises only what the call takes.

Where it names an argument, the same load with that argument fits.
"""

import argparse
import collections
import itertools
import random
import re
import time

import numpy as np
import pytest
import torch
from support import assert_same, logged

import ringstow
from ringstow._state.tree._mismatch import LOAD_INTO, Mismatch


def net(*sizes):
    torch.manual_seed(len(sizes))
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def with_prefix(prefix, state):
    return {f"{prefix}{name}": value for name, value in state.items()}


def zeros(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


def saved(state, at):
    ringstow.save(state, at)
    return at


def mismatch(into, path, **options):
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(into, path, **options)
    return str(caught.value)


def advised(text):
    """Return the arguments that an error advises, as Python."""
    found = re.findall(r"(prefix|rename)=(\"[^\"]*\"|\{[^}]*\})", text)
    return {name: eval(value) for name, value in found}


def filled(into, path, *arguments):
    """Load as the error advises, which names these arguments; return the error's text."""
    text = mismatch(into, path)
    assert list(advised(text)) == list(arguments)
    ringstow.load_into(into, path, **advised(text))
    return text


# Names that differ by a prefix or a step.

PLAIN = {"layers.0.q.weight": torch.ones(2, 2), "layers.1.q.weight": torch.ones(2, 2) * 2}
WRAPPED = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "compiled layers": lambda name: name.replace(".q", "._orig_mod.q"),
    "checkpointed layers": lambda name: name.replace(".q", "._checkpoint_wrapped_module.q"),
    "an adapter's name": lambda name: name.replace("weight", "default.weight"),
    "PEFT": lambda name: f"base_model.model.{name.replace('.weight', '.base_layer.weight')}",
    "an own wrapper": lambda name: f"policy.net.{name}",
    "an own step": lambda name: name.replace("q", "inner.q"),
    "two wrappers": lambda name: (
        "module." + name.replace(".1.q", ".1._checkpoint_wrapped_module.q")
    ),
}


@pytest.mark.parametrize("who", WRAPPED)
@pytest.mark.parametrize("side", ["here", "there"])
def test_steps_that_one_side_has_are_named_with_the_rename_that_fits(tmp_path, who, side):
    wrapped = {WRAPPED[who](name): value for name, value in PLAIN.items()}
    there, here = (PLAIN, wrapped) if side == "here" else (wrapped, PLAIN)
    path = saved({"model": there, "step": 3}, tmp_path / "c")
    into = {"model": zeros(here), "step": 0}
    text = filled(into, path, "rename")
    assert "strict=False" not in text
    assert_same(into, {"model": here, "step": 3})
    if who in ("DistributedDataParallel", "torch.compile"):
        assert f"the prefix '{WRAPPED[who]('')}' ({who}" in text


@pytest.mark.parametrize("names", [PLAIN, with_prefix("module.", PLAIN)], ids=["plain", "ddp"])
def test_a_part_of_the_checkpoint_is_named_with_the_prefix_that_loads_it(tmp_path, names):
    path = saved({"model": names, "optimizer": {"lr": 0.1}, "step": 3}, tmp_path / "c")
    into = zeros(PLAIN)
    filled(into, path, "prefix")
    assert_same(into, PLAIN)


def test_a_prefix_is_not_advised_where_other_names_would_not_fit(tmp_path):
    path = saved({"model": PLAIN, "step": 3}, tmp_path / "c")
    into = {**zeros(PLAIN), "step": 0}
    ringstow.load_into(into, path, **advised(mismatch(into, path)))
    assert_same(into, {**PLAIN, "step": 3})


def test_a_part_that_has_grown_is_loaded_with_the_prefix_and_without_strict(tmp_path):
    path = saved({"model": PLAIN, "step": 3}, tmp_path / "c")
    into = {**zeros(PLAIN), "new": torch.zeros(1)}
    text = mismatch(into, path)
    assert "strict=False" in text
    report = ringstow.load_into(into, path, strict=False, **advised(text))
    assert (report.missing, report.unexpected) == (("new",), ())


def test_a_checkpoint_of_a_part_says_which_part_to_pass(tmp_path):
    path = saved(PLAIN, tmp_path / "c")
    text = mismatch({"model": zeros(PLAIN), "step": 0}, path)
    assert "pass state_dict['model']" in text
    into = zeros(PLAIN)
    ringstow.load_into(into, path)
    assert_same(into, PLAIN)


# prefix= and rename=.


def test_prefix_takes_the_part_for_the_whole(tmp_path):
    model = net(3, 4, 5)
    path = saved({"nets": {"a": model.state_dict(), "b": {"x": 1}}, "step": 3}, tmp_path / "c")
    other = net(3, 4, 5)
    report = ringstow.load_into(other.state_dict(), path, prefix="nets.a")
    assert (report.missing, report.unexpected) == ((), ())
    assert_same(other.state_dict(), model.state_dict())
    into = {"x": 0}
    ringstow.load_into(into, path, prefix="nets.b.")
    assert into == {"x": 1}
    assert "only in the checkpoint (1): x" in mismatch({}, path, prefix="nets.b")


def test_prefix_and_rename_read_what_other_programs_left(tmp_path):
    torch.save({"state_dict": with_prefix("net.", PLAIN), "epoch": 3}, tmp_path / "old.ckpt")
    into = zeros(PLAIN)
    filled(into, tmp_path / "old.ckpt", "prefix")
    assert_same(into, PLAIN)
    into = zeros(PLAIN)
    ringstow.load_into(into, tmp_path / "old.ckpt", prefix="state_dict", rename={"net": ""})
    assert_same(into, PLAIN)


def test_prefix_reads_no_other_tensor(tmp_path):
    path = saved({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(9_000_000)}}, tmp_path / "c")
    report = ringstow.load_into({"w": torch.zeros(2)}, path, prefix="a")
    assert report.tensor_bytes == 8


def test_a_prefix_that_is_not_there_suggests_one_that_is(tmp_path):
    path = saved({"model": PLAIN, "step": 3}, tmp_path / "c")
    assert "'modle'" in mismatch(zeros(PLAIN), path, prefix="modle")
    assert "keys=['step']" in mismatch({"step": 0}, path, prefix="step")
    with pytest.raises(TypeError, match="prefix is one name"):
        ringstow.load_into({}, path, prefix=["model"])


def test_rename_maps_steps_and_swaps_names(tmp_path):
    a, b = torch.ones(2), torch.full((2,), 2.0)
    path = saved({"net": {"q": {"w": a}, "k": {"w": b}}}, tmp_path / "c")
    into = {"net": {"k": {"w": torch.zeros(2)}, "q": {"w": torch.zeros(2)}}}
    ringstow.load_into(into, path, rename={"q": "k", "k": "q"})
    assert_same(into, {"net": {"k": {"w": a}, "q": {"w": b}}})
    into = {"net.key.w": torch.zeros(2), "query": {"w": torch.zeros(2)}}
    ringstow.load_into(into, path, rename={"net.q": "query", "k": "key"})
    assert_same(into, {"net.key.w": b, "query": {"w": a}})


def test_rename_reaches_state_dicts_in_lists_and_keeps_the_rest(tmp_path):
    there = {"nets": [{"module.w": torch.ones(2)}, {"module.w": torch.ones(3)}], "n": (1, 2)}
    path = saved(there, tmp_path / "c")
    into = {"nets": [{"w": torch.zeros(2)}, {"w": torch.zeros(3)}], "n": ()}
    ringstow.load_into(into, path, rename={"module": ""})
    assert_same(into, {"nets": [{"w": torch.ones(2)}, {"w": torch.ones(3)}], "n": (1, 2)})


def test_rename_keeps_keys_and_values_of_other_types(tmp_path):
    there = {
        "o": {"state": {0: {"module.m": torch.ones(1)}}, "groups": [{"params": [0]}]},
        "count": collections.Counter([5, 5]),
        torch.float16: np.ones(2),
        "none": {},
    }
    path = saved(there, tmp_path / "c")
    into = {
        "o": {"state": {0: {"m": torch.zeros(1)}}, "groups": [{"params": []}]},
        "count": collections.Counter(),
        torch.float16: np.zeros(2),
        "none": {},
    }
    ringstow.load_into(into, path, rename={"module": ""})
    there["o"]["state"][0] = {"m": torch.ones(1)}
    assert_same(into, there)


def test_rename_still_compares_everything(tmp_path):
    there = with_prefix("module.", PLAIN) | {"more": torch.ones(1)}
    path = saved(there, tmp_path / "c")
    into = zeros(PLAIN) | {"layers.0.q.weight": torch.zeros(3)}
    text = mismatch(into, path, rename={"module": ""})
    assert "only in the checkpoint (1): more" in text
    assert "F32 [3] here and F32 [2, 2] in the checkpoint" in text
    into = zeros(PLAIN) | {"x": torch.zeros(1)}
    report = ringstow.load_into(into, path, rename={"module": ""}, strict=False)
    assert (report.missing, report.unexpected) == (("x",), ("more",))
    assert torch.equal(into["layers.1.q.weight"], PLAIN["layers.1.q.weight"])


def test_rename_refuses_to_make_two_names_one(tmp_path):
    path = saved({"w": torch.ones(1), "module": {"w": torch.ones(1)}}, tmp_path / "c")
    into = {"w": torch.zeros(1)}
    assert "w and module['w']" in mismatch(into, path, rename={"module": ""}, strict=False)
    path = saved({"w": torch.ones(1)}, tmp_path / "d")
    into = {"w": torch.zeros(1), "module.w": torch.zeros(1)}
    assert "two names of the state dict" in mismatch(into, path, rename={"module": ""})
    assert into["w"].item() == 0


@pytest.mark.parametrize("rename", [{"": "module"}, "module", {"module": None}], ids=str)
def test_rename_that_is_none_is_refused(tmp_path, rename):
    path = saved({"w": torch.ones(1)}, tmp_path / "c")
    with pytest.raises((TypeError, ValueError), match=r'rename.*\{"module": ""\}'):
        ringstow.load_into({"w": torch.ones(1)}, path, rename=rename)


# Other kinds.


def test_text_keys_and_number_keys_are_shown_as_python_has_them(tmp_path):
    for there, here, remedy in (("0", 0, "str(key)"), (0, "0", "int(key)")):
        path = saved({"layers": {there: torch.ones(2)}}, tmp_path / remedy)
        shown = mismatch({"layers": {here: torch.ones(2)}}, path)
        assert f"not in the checkpoint (1): layers[{here!r}]; only in the" in shown
        assert f"only in the checkpoint (1): layers[{there!r}]" in shown
        assert remedy in shown


def test_keys_with_dots_and_nested_dicts_are_told_apart(tmp_path):
    path = saved({"a": {"b": torch.ones(2)}}, tmp_path / "c")
    into = {"a.b": torch.zeros(2)}
    assert "a['b'] in the checkpoint" in filled(into, path, "rename")
    assert into["a.b"].tolist() == [1, 1]


def test_renamed_layers_are_paired_by_dtype_and_shape(tmp_path):
    def layers(name):
        return {f"layers.{i}.{name}.weight": torch.full((3, i + 1), i + 1.0) for i in range(8)}

    path = saved({"model": {**layers("q"), "head": torch.ones(2)}}, tmp_path / "c")
    into = {"model": zeros({**layers("wq"), "head": torch.ones(2)})}
    text = filled(into, path, "rename")
    assert "model.layers.0.q.weight -> model.layers.0.wq.weight" in text
    assert_same(into, {"model": {**layers("wq"), "head": torch.ones(2)}})


def test_a_rename_is_not_advised_where_it_would_change_other_names(tmp_path):
    there = {"a": {"fc": {"w": torch.ones(2)}}, "b": {"fc": {"w": torch.full((3,), 3.0)}}}
    path = saved(there, tmp_path / "c")
    into = {"a": {"head": {"w": torch.zeros(2)}}, "b": {"fc": {"w": torch.zeros(3)}}}
    ringstow.load_into(into, path, **advised(mismatch(into, path)))
    assert into["a"]["head"]["w"].tolist() == [1, 1]
    assert into["b"]["fc"]["w"].tolist() == [3, 3, 3]


def test_sizes_say_that_strict_alone_does_not_help(tmp_path):
    path = saved({"emb": torch.ones(5, 2), "w": torch.ones(2)}, tmp_path / "c")
    for strict in (True, False):
        text = mismatch({"emb": torch.zeros(6, 2), "w": torch.zeros(2)}, path, strict=strict)
        assert "sizes differ" in text
        assert "leave these out" in text
        assert strict or "strict=False" not in text
    into = {"w": torch.zeros(2)}
    ringstow.load_into(into, path, strict=False)
    assert into["w"].tolist() == [1, 1]


def test_a_layer_of_another_size_stays_by_another_name_and_the_others_get_their_moments(tmp_path):
    def trained(classes):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, classes))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    old, new = trained(4), trained(5)
    path = saved(old, tmp_path / "c")
    before = new["model"][1].weight.clone()
    assert 'rename={"head": "old_head"}' in mismatch(new, path, strict=False)
    ringstow.load_into(new, path, rename={"1": "old"}, strict=False)
    assert torch.equal(new["model"][1].weight, before)
    moments = [one["optimizer"].state[one["model"][0].weight]["exp_avg_sq"] for one in (old, new)]
    assert torch.equal(*moments)


def test_dtypes_that_cast_does_not_convert_are_told_from_those_that_it_does(tmp_path):
    path = saved({"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, tmp_path / "c")
    text = mismatch({"w": torch.zeros(2).half(), "n": torch.zeros(2, dtype=torch.int64)}, path)
    assert "cast=True" in text
    text = mismatch({"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int32)}, path)
    assert "cast=True" not in text
    assert "no load converts" in text


def trained(kind):
    model = net(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_another_optimizer_is_no_renamed_state(tmp_path):
    def momentum(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    path = saved(trained(torch.optim.Adam), tmp_path / "c")
    text = mismatch(trained(momentum), path)
    assert "another optimizer" in text
    assert "momentum_buffer" in text
    assert "->" not in text


class Plain:
    """A class of a program."""

    def __init__(self):
        self.x = 1


@pytest.mark.parametrize(
    ("value", "stored", "advice"),
    [
        (torch.Generator(), torch.Generator().get_state(), "x.get_state()"),
        (random.Random(1), random.Random(1).getstate(), "x.getstate()"),
        (Plain(), {"x": 1}, "vars(x)"),
        (Plain(), torch.ones(1), "vars(x)"),
        (iter([1]), [1], "list(x)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_a_load_cannot_fill_is_no_value_to_replace(tmp_path, value, stored, advice):
    path = saved({"v": stored, "w": torch.ones(1)}, tmp_path / "c")
    into = {"v": value, "w": torch.zeros(1)}
    text = mismatch(into, path)
    assert advice in text
    assert "save" not in text
    assert into["v"] is value
    assert into["w"].item() == 0


def test_values_that_a_save_takes_are_still_replaced(tmp_path):
    there = {"d": torch.float16, "n": argparse.Namespace(x=1), "s": {1}, "c": 1j, "b": b"x"}
    path = saved(there, tmp_path / "c")
    into = {"d": torch.float32, "n": argparse.Namespace(x=2), "s": set(), "c": 0j, "b": b""}
    ringstow.load_into(into, path)
    assert_same(into, there)


def test_fields_that_have_more_to_them_are_named_by_a_ringstow_error(tmp_path):
    Point = collections.namedtuple("Point", "x")

    class Odd(Point):
        pass

    odd = Odd(torch.zeros(1))
    odd.more = 1
    path = saved({"p": (torch.ones(1),)}, tmp_path / "c")
    assert "p is" in mismatch({"p": odd}, path)


# strict=False.


def test_a_load_that_fills_nothing_is_an_error(tmp_path):
    path = saved({"model": with_prefix("module.", PLAIN)}, tmp_path / "c")
    model = collections.OrderedDict(zeros(PLAIN))
    model._metadata = {"": {"version": 1}}
    text = mismatch({"model": model}, path, strict=False)
    assert "would fill nothing" in text
    assert "strict=False" not in text
    ringstow.load_into({"model": model}, path, strict=False, **advised(text))
    assert_same(dict(model), PLAIN)
    ringstow.load_into({}, path, strict=False)  # nothing is wanted


def test_a_load_that_fills_little_warns_with_counts_and_the_reason(tmp_path):
    path = saved({"model": with_prefix("module.", PLAIN), "step": 3}, tmp_path / "c")
    into = {"model": zeros(PLAIN), "step": 0}
    with logged("fills") as told:
        ringstow.load_into(into, path, strict=False)
    (said,) = told
    assert "fills 0 of the 2 tensors" in said
    assert 'rename={"module": ""}' in said
    assert into["step"] == 3
    half = saved({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "half")
    with logged("fills") as told:
        ringstow.load_into({"a": torch.zeros(1), "x": torch.zeros(1)}, half, strict=False)
    assert told == []


# restore.


def test_restore_names_only_what_it_takes(tmp_path):
    with ringstow.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": with_prefix("module.", PLAIN), "more": 1})

        def said(into, **options):
            with pytest.raises(ringstow.KeyMismatchError) as caught:
                manager.restore(into=into, **options)
            return str(caught.value)

        text = said({"model": zeros(PLAIN), "more": 0})
        assert 'rename={"module": ""} strips it' in text
        text = said({"model": zeros(with_prefix("module.", PLAIN))})
        assert "strict=False" in text
        half = {k: v.half() for k, v in with_prefix("module.", PLAIN).items()}
        assert "; cast=True" not in said({"model": half, "more": 0})
        assert "would fill nothing" in said({"model": zeros(PLAIN)}, strict=False)


def test_restore_without_strict_loads_what_is_in_both(tmp_path):
    with ringstow.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": PLAIN, "more": 1})
        into = {"model": zeros(PLAIN), "here": 5}
        restored = manager.restore(into=into, strict=False)
    assert restored.step == 1
    assert_same(into, {"model": PLAIN, "here": 5})


# Cost.


@pytest.mark.parametrize("change", ["module.{}", "{}.inner", "other.{}.w"])
def test_many_names_are_diagnosed_in_n_log_n(change):
    def seconds(count):
        names = [f"layers.{i // 8}.block.{i % 8}" for i in range(count)]
        here = [(("model", name), torch.float32) for name in names]
        there = [(("model", change.format(name)), torch.float32) for name in names]
        found = Mismatch(
            "run", {}, here, there, [], set(), LOAD_INTO, lambda: here, lambda value: (value,)
        )
        started = time.process_time()
        assert found.advice()
        return time.process_time() - started

    seconds(100)
    assert seconds(20_000) < 40 * seconds(2_000)
