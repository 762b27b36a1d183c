"""A rename joins, splits and turns tensors on the way, and each byte is read once.

What it makes equals what torch makes of the loaded tensors, bit by bit.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from safetensors.torch import save_file
from support import assert_same, flip, python, shards_of

import ringstow
from ringstow import Concat, Split, Stack, Transpose, Unstack

EXPERTS, WIDE, NARROW = 12, 5, 3
KINDS = ("gate_proj", "up_proj", "down_proj")


def tensor(*shape, dtype=torch.float32):
    numbers = torch.arange(math.prod(shape), dtype=torch.float32) + sum(shape)
    return numbers.reshape(shape).to(dtype)


def apart(layers=2):
    """Return a model with one tensor an expert."""
    state = {}
    for layer, number in itertools.product(range(layers), range(EXPERTS)):
        for n, kind in enumerate(KINDS):
            shape = (NARROW, WIDE) if kind == "down_proj" else (WIDE, NARROW)
            name = f"layers.{layer}.mlp.experts.{number}.{kind}.weight"
            state[name] = tensor(*shape) * (number + 1) + n + layer
    for layer in range(layers):
        for name, rows in (("q", 8), ("k", 2), ("v", 4)):
            state[f"layers.{layer}.attn.{name}.weight"] = tensor(rows, 6) + ord(name)
    state["norm.weight"] = tensor(7)
    return state


def fused(state):
    """Return the same model with fused experts and attention, made by torch."""
    made = {"norm.weight": state["norm.weight"].clone()}
    for layer in range(2):
        part = f"layers.{layer}."
        gate, up, down = (
            torch.stack([state[f"{part}mlp.experts.{e}.{kind}.weight"] for e in range(EXPERTS)])
            for kind in KINDS
        )
        made[f"{part}mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        made[f"{part}mlp.experts.down_proj"] = down.transpose(1, 2).contiguous()
        made[f"{part}attn.qkv.weight"] = torch.cat([state[f"{part}attn.{n}.weight"] for n in "qkv"])
    return made


FUSE = {
    ("experts.*.gate_proj.weight", "experts.*.up_proj.weight"): Stack(
        Concat("experts.gate_up_proj", dim=1)
    ),
    "experts.*.down_proj.weight": Stack(Transpose("experts.down_proj", dims=(1, 2))),
    ("attn.q", "attn.k", "attn.v"): Concat("attn.qkv"),
}
UNFUSE = {
    "experts.gate_up_proj": Split(
        (Unstack("experts.*.gate_proj.weight"), Unstack("experts.*.up_proj.weight")), dim=1
    ),
    "experts.down_proj": Transpose(Unstack("experts.*.down_proj.weight"), dims=(1, 2)),
    "attn.qkv": Split(("attn.q", "attn.k", "attn.v")),
}


def zeros(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


def write(state, path, kind):
    if kind == "ringstow":
        ringstow.save(state, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        path.mkdir()
        save_file(state, path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", ["ringstow", "hf", "torch"])
def test_fused_experts_and_one_tensor_an_expert_load_as_each_other(kind, tmp_path):
    state = apart()
    into = zeros(fused(state))
    report = ringstow.load_into(into, write(state, tmp_path / "apart", kind), rename=FUSE)
    assert_same(into, fused(state))
    assert report.missing == report.unexpected == ()
    back = zeros(state)
    ringstow.load_into(back, write(into, tmp_path / "fused", kind), rename=UNFUSE)
    assert_same(back, state)


def test_a_load_without_a_state_dict_makes_the_same_tensors(tmp_path):
    state = apart()
    ringstow.save({"model": state, "step": 3}, tmp_path / "c")
    loaded = ringstow.load(tmp_path / "c", rename=FUSE)
    assert loaded["step"] == 3
    assert_same(loaded["model"], {name: fused(state)[name] for name in loaded["model"]})
    assert loaded["model"].keys() == fused(state).keys()
    ringstow.save(loaded, tmp_path / "f")
    with pytest.raises(
        ringstow.KeyMismatchError, match=r'Split needs sizes=, such as sizes="equal"'
    ):
        ringstow.load(tmp_path / "f", rename=UNFUSE)
    parts = Split(UNFUSE["experts.gate_up_proj"].to, dim=1, sizes="equal")
    qkv = Split(UNFUSE["attn.qkv"].to, sizes=(8, 2, 4))
    rename = {**UNFUSE, "experts.gate_up_proj": parts, "attn.qkv": qkv}
    back = ringstow.load(tmp_path / "f", rename=rename, framework="numpy")["model"]
    assert_same({name: torch.from_numpy(back[name]) for name in state}, state)


def test_names_around_a_map_are_renamed_too(tmp_path):
    state = {f"module.old.{name}": value for name, value in apart().items()}
    ringstow.save(state, tmp_path / "c")
    into = {f"new.{name}": torch.zeros_like(value) for name, value in fused(apart()).items()}
    ringstow.load_into(into, tmp_path / "c", rename={"module": "", "old": "new", **FUSE})
    assert_same(into, {f"new.{name}": value for name, value in fused(apart()).items()})
    listed = [{"module.old": ""}, {"layers": "blocks"}, FUSE]
    into = {
        name.replace("layers", "blocks"): torch.zeros_like(v) for name, v in fused(apart()).items()
    }
    ringstow.load_into(into, tmp_path / "c", rename=listed)
    assert into["blocks.1.attn.qkv.weight"].equal(fused(apart())["layers.1.attn.qkv.weight"])


def test_a_star_stands_for_one_step_of_a_name(tmp_path):
    state = {"h": {"0": {"w": tensor(2)}, "1": {"w": tensor(3)}}, "w": tensor(4)}
    ringstow.save(state, tmp_path / "c")
    into = {"blocks.0.mlp.w": torch.zeros(2), "blocks.1.mlp.w": torch.zeros(3), "w": torch.zeros(4)}
    ringstow.load_into(into, tmp_path / "c", rename={"h.*.w": "blocks.*.mlp.w"})
    assert into["blocks.1.mlp.w"].equal(tensor(3))


LAYOUTS = {
    "strided": lambda t: torch.zeros(*t.shape[:-1], 2 * t.shape[-1])[..., ::2],
    "transposed": lambda t: torch.zeros(t.shape[::-1]).permute(*reversed(range(t.ndim))),
    "bfloat16": lambda t: torch.zeros(t.shape, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_of_any_layout_are_filled(layout, tmp_path):
    state = apart()
    ringstow.save(state, tmp_path / "c")
    expected = fused(state)
    into = {name: LAYOUTS[layout](value) for name, value in expected.items()}
    ringstow.load_into(into, tmp_path / "c", rename=FUSE, cast=layout == "bfloat16")
    for name, value in into.items():
        assert value.equal(expected[name].to(value.dtype)), name


def test_each_byte_is_read_once(tmp_path):
    """Of files that are larger than all pages and checksum chunks at the edges."""
    big = {f"experts.{n}.w": torch.full((1024, 512), float(n)) for n in range(16)}
    ringstow.save(big, tmp_path / "apart")
    into = {"experts.w": torch.zeros(16, 1024, 512)}
    report = ringstow.load_into(
        into, tmp_path / "apart", rename={"experts.*.w": Stack("experts.w")}
    )
    assert into["experts.w"][:, 5, 7].tolist() == list(range(16))
    total = 16 * 1024 * 512 * 4
    assert total <= report.read_bytes <= total + 4096
    ringstow.save(into, tmp_path / "fused")
    back = zeros(big)
    rename = {"experts.w": Unstack("experts.*.w")}
    report = ringstow.load_into(back, tmp_path / "fused", rename=rename)
    assert_same(back, big)
    assert total <= report.read_bytes <= total + 4096
    # A part reads its part.
    few = {f"experts.{n}.w": torch.zeros(1024, 512) for n in (3, 4)}
    report = ringstow.load_into(few, tmp_path / "fused", rename=rename, strict=False)
    assert_same(few, {name: big[name] for name in few})
    assert report.read_bytes <= 2 * 1024 * 512 * 4 + (2 << 20)


CHILD = """
import resource, sys, torch, ringstow
into = {"experts.w": torch.ones(64, 1024, 512)}                     # 128 MiB, touched
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = ringstow.Config(pool_bytes=16 << 20)
rename = {"experts.*.w": ringstow.Stack("experts.w")}
ringstow.load_into(into, sys.argv[1], rename=rename, config=config)
assert into["experts.w"][:, 9, 9].tolist() == list(range(64))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_memory_of_a_map_is_the_pool(tmp_path):
    state = {f"experts.{n}.w": torch.full((1024, 512), float(n)) for n in range(64)}
    ringstow.save(state, tmp_path / "c")
    del state
    ran = python(CHILD, tmp_path / "c", check=True)
    assert int(ran.stdout) << 10 <= (16 << 20) + (24 << 20)  # the pool, and the program's own


def test_a_flipped_bit_in_one_expert_is_the_load_s_error(tmp_path):
    ringstow.save(apart(), tmp_path / "c")
    (shard,) = shards_of(tmp_path / "c")
    flip(shard, shard.stat().st_size // 2)
    into = zeros(fused(apart()))
    with pytest.raises(ringstow.CorruptCheckpointError):
        ringstow.load_into(into, tmp_path / "c", rename=FUSE)
    with pytest.warns(ringstow.CorruptCheckpointWarning):
        report = ringstow.load_into(into, tmp_path / "c", rename=FUSE, on_corrupt="skip")
    assert report.damaged


def wide(**lots):
    return {name: torch.zeros(shape) for name, shape in lots.items()}


WRONG = {
    "a number is missing": (
        {"e.0.w": (2,), "e.2.w": (2,)},
        {"e.*.w": Stack("w")},
        r"cannot map e\.\*\.w: number 1 of 3 is missing",
    ),
    "a name is missing": (
        {"a.q": (2,), "a.k": (2,), "b.q": (2,)},
        {("q", "k"): Concat("qk")},
        r"joins b\.k, which the checkpoint does not have",
    ),
    "shapes differ": (
        {"e.0.w": (2,), "e.1.w": (3,)},
        {"e.*.w": Stack("w")},
        r"F32 \[2\] and F32 \[3\] do not fit together",
    ),
    "one dimension": (
        {"w": (2, 2)},
        {"w": Transpose("w", dims=(0, -2))},
        r"dimensions 0 and -2 of F32 \[2, 2\] are one",
    ),
    "no such dimension": ({"w": (2,)}, {"w": Transpose("w")}, r"F32 \[2\] has no dimension 1"),
    "sizes": (
        {"w": (5,)},
        {"w": Split(("a", "b"), sizes=(2, 2))},
        r"has 5 along dimension 0, not \[2, 2\]",
    ),
    "not a number": ({"e.x.w": (2,)}, {"e.*.w": Stack("w")}, r"a \* to join stands for a number"),
    "two become one": (
        {"a.w": (2,), "b.0.w": (2,)},
        {"b.*.w": Stack("a.w", dim=0)},
        r"two names of the checkpoint are one",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_joined_is_an_error_before_anything_changes(case, tmp_path):
    shapes, rename, message = WRONG[case]
    ringstow.save(wide(**shapes), tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError, match=message):
        ringstow.load_into({"w": torch.zeros(2)}, tmp_path / "c", rename=rename)
    with pytest.raises(ringstow.KeyMismatchError, match=message):
        ringstow.load(tmp_path / "c", rename=rename)


E = {f"model.e.{n}.{kind}": (2, 3) for n in range(11) for kind in "wv"}
STACKED = {"e.*.w": Stack("e.w")}
CUT = {
    "keys": ({"keys": ["model.e.0.w", "model.e.1.w"]}, STACKED, r"left out \(9\): model\.e\.2\.w"),
    "a prefix": ({"prefix": "model.e.0"}, STACKED, r"left out \(10\): model\.e\.1\.w"),
    "the last of several": (
        {"keys": ["model.e.10.w"]},
        {("e.*.w", "e.*.v"): Stack(Concat("e.wv"))},
        r"left out \(21\): .*model\.e\.0\.v",
    ),
    "a star that is joined": (
        {"prefix": "model.e.1"},
        {"e.*.w": Transpose(Concat("e.w"))},
        r"left out \(10\): model\.e\.0\.w",
    ),
    "a name of several": (
        {"keys": ["model.e.1.w"]},
        {("w", "v"): Concat("wv")},
        r"left out \(1\): model\.e\.1\.v\.",
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_a_selection_that_cuts_a_joined_tensor_is_an_error(case, tmp_path):
    selection, rename, message = CUT[case]
    ringstow.save(wide(**E), tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError, match=message):
        ringstow.load(tmp_path / "c", **selection, rename=rename)


def test_a_selection_of_whole_joined_tensors_loads(tmp_path):
    ringstow.save(wide(**E), tmp_path / "c")
    keys = [name for name in E if name.endswith("w")]
    loaded = ringstow.load(tmp_path / "c", keys=keys, rename=STACKED)
    assert loaded["model.e.w"].shape == (11, 2, 3)
    rename = {("w", "v"): Concat("wv")}
    assert [*ringstow.load(tmp_path / "c", prefix="model.e.3", rename=rename)] == ["model.e.3.wv"]
    turned = ringstow.load(tmp_path / "c", keys=keys[:1], rename={"w": Transpose("w")})
    assert turned["model.e.0.w"].shape == (3, 2)


IDLE = {"x.*.w": Stack("x.w"), "step": Transpose("step"), ("a", "b"): Concat("ab"), "old": "new"}
FINDS_NONE = {
    "load": lambda path, to: ringstow.load(path, rename=[{"e": "f"}, IDLE]),
    "load_into": lambda path, to: ringstow.load_into({"w": torch.zeros(2)}, path, rename=IDLE),
    "convert": lambda path, to: ringstow.convert.convert(path, to, target="hf", rename=IDLE),
}


@pytest.mark.parametrize("way", FINDS_NONE)
def test_an_entry_that_maps_no_tensor_is_told_once(way, tmp_path, caplog):
    """A plain name that matches nothing is not: many checkpoints share one rename."""
    ringstow.save({"w": tensor(2), "step": 3}, tmp_path / "c")
    with contextlib.suppress(ringstow.KeyMismatchError):
        FINDS_NONE[way](tmp_path / "c", tmp_path / "to")
    (said,) = [text for text in caplog.messages if "rename=" in text]
    assert said.endswith("entries of rename= that match no tensor (3): 'x.*.w', 'step', ('a', 'b')")


def test_entries_that_map_are_not_told(tmp_path, caplog):
    ringstow.save(apart(), tmp_path / "c")
    ringstow.load(tmp_path / "c", rename=FUSE)
    assert not [text for text in caplog.messages if "rename=" in text]


REFUSED = {
    "an empty name": ({"": "a"}, ValueError, 'and "" is none'),
    "two names for one": ({("a", "b"): "c"}, ValueError, "join them by Concat or Stack"),
    "a stack of nothing": ({"a": Stack("b")}, ValueError, r"stacks the tensors of a \*"),
    "a concat of one": ({"a": Concat("b")}, ValueError, "its key has one name"),
    "a star too many": ({"a.*": "b"}, ValueError, r"with 0 \*, where 1 are needed"),
    "a star too few": ({"a": Unstack("b")}, ValueError, r"with 0 \*, where 1 are needed"),
    "a split of two": ({("a", "b"): Split(("c", "d"))}, ValueError, "join the 2 names by Concat"),
    "sizes": ({"a": Split(("b", "c"), sizes=(1,))}, ValueError, "has 2 names and 1 sizes"),
    "text for names": ({"a": Split("bc")}, ValueError, "needs a tuple of names"),
    "different stars": ({("a.*", "b"): Concat("c")}, ValueError, r"different numbers of \*"),
    "a number": ({"a": 1}, TypeError, "to a Stack, Unstack, Concat, Split or Transpose, not to 1"),
    "nothing": ({"a": None}, TypeError, "rename maps a name to a name, .* not to None"),
    "one dimension": ({"a": Transpose("a", dims=(0, 0))}, ValueError, "needs two different ones"),
    "text": ("module", TypeError, "rename is a dict"),
    "text in a list": (["module"], TypeError, "rename is a dict"),
    "another object": ({"a": Stack(3)}, ValueError, r"stacks the tensors of a \*"),
    "an object of an object": ({"a.*": Stack(3)}, TypeError, "not to 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_map_that_fits_no_tensors_is_refused_at_once(case, tmp_path):
    rename, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        ringstow.load_into({"w": torch.zeros(2)}, tmp_path, rename=rename)


def test_tensors_of_several_dtypes_are_not_joined_and_a_cast_is_no_help(tmp_path):
    state = {"e.0.w": tensor(2), "e.1.w": tensor(2, dtype=torch.bfloat16)}
    ringstow.save(state, tmp_path / "c")
    into = {"e.w": torch.zeros(2, 2)}
    message = "must have one dtype in the checkpoint; cast= converts the whole"
    with pytest.raises(ringstow.KeyMismatchError, match=message):
        ringstow.load_into(into, tmp_path / "c", rename={"e.*.w": Stack("e.w")}, cast=True)


@pytest.mark.parametrize("rename", [None, {"a": "b"}])
def test_a_conversion_without_a_target_lists_the_kinds_that_it_can_make(rename, tmp_path):
    ringstow.save({"a": tensor(2)}, tmp_path / "c")
    kinds = r"\(target=\) dcp, torch" if rename is None else r"\(target=\) ringstow, dcp, torch"
    with pytest.raises(ringstow.InvalidStateError, match=kinds):
        ringstow.convert.convert(tmp_path / "c", tmp_path / "to", rename=rename)
    ringstow.convert.convert(tmp_path / "c", tmp_path / "to", target="ringstow", rename=rename)
    assert [*ringstow.load(tmp_path / "to")] == ["a" if rename is None else "b"]


def test_a_manager_restores_by_a_map(tmp_path):
    state = apart()
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"module": state, "step": 1})
        into = {"module": zeros(fused(state)), "step": 0}
        with pytest.raises(ringstow.KeyMismatchError):
            manager.restore(into=into)
        assert manager.restore(into=into, rename=FUSE).step == 1
        assert_same(into["module"], fused(state))
        assert manager.restore(rename=FUSE).state["module"].keys() == fused(state).keys()


def test_an_optimizer_whose_parameters_would_be_joined_is_refused(tmp_path):
    model = torch.nn.ModuleDict({str(n): torch.nn.Linear(2, 2, bias=False) for n in range(2)})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    sum(one(torch.ones(1, 2)).sum() for one in model.values()).backward()
    optimizer.step()
    ringstow.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    whole = torch.nn.ParameterDict({"weight": torch.zeros(2, 2, 2)})
    state = {"model": whole, "optimizer": torch.optim.SGD(whole.parameters(), momentum=0.9)}
    with pytest.raises(ringstow.UnsupportedError, match="joins or splits 0.weight"):
        ringstow.load_into(state, tmp_path / "c", rename={"*.weight": Stack("weight")})
    ringstow.load_into(
        {"model": whole}, tmp_path / "c", rename={"*.weight": Stack("weight")}, strict=False
    )
    assert whole["weight"][1].equal(model["1"].weight)


class Attention(torch.nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(4, 12 // len(names), bias=False))


QKV = {("q.weight", "k.weight", "v.weight"): Concat("qkv.weight")}


def trained(path, kind="ringstow"):
    """Write a model with an Adam; return the joined weight."""
    model = Attention("q", "k", "v")
    optimizer = torch.optim.Adam(model.parameters())
    sum(one.weight.sum() for one in model.children()).backward()
    optimizer.step()
    write({"model": model, "optimizer": optimizer, "step": 1}, path, kind)
    return torch.cat([one.weight.detach() for one in model.children()])


def restored(path, into):
    with ringstow.CheckpointManager(path.parent / "run") as manager:
        manager.save(1, ringstow.load(path))
        manager.restore(into=into, rename=QKV, strict=False)


FILL = {
    "load_into": lambda path, into: ringstow.load_into(into, path, rename=QKV, strict=False),
    "restore": restored,
    "a list": lambda path, into: ringstow.load_into(into, path, rename=[{}, QKV], strict=False),
}


@pytest.mark.parametrize("way", FILL)
def test_a_map_leaves_an_optimizer_alone_that_the_state_dict_has_not(way, tmp_path):
    expected = trained(tmp_path / "c")
    model = Attention("qkv")
    FILL[way](tmp_path / "c", {"model": model})
    assert model.qkv.weight.equal(expected)


@pytest.mark.parametrize("plain", [False, True])
def test_a_map_refuses_an_optimizer_that_the_state_dict_has(plain, tmp_path):
    trained(tmp_path / "c")
    model = Attention("qkv")
    optimizer = torch.optim.Adam(model.parameters())
    into = {"model": model, "optimizer": optimizer.state_dict() if plain else optimizer}
    before = model.qkv.weight.detach().clone()
    with pytest.raises(
        ringstow.UnsupportedError, match="alone, without the optimizer in the state"
    ):
        ringstow.load_into(into, tmp_path / "c", rename=QKV, strict=False)
    assert model.qkv.weight.equal(before)


def test_a_map_of_a_whole_checkpoint_names_the_part_without_the_optimizer(tmp_path):
    path = tmp_path / "c"
    expected = trained(path)
    with pytest.raises(
        ringstow.UnsupportedError, match="optimizer's state cannot follow"
    ) as caught:
        ringstow.load(path, rename=QKV)
    advised = str(caught.value).partition("alone, by ")[2].replace("...", "QKV")
    assert eval(advised)["model"]["qkv.weight"].equal(expected)
    with pytest.raises(ringstow.UnsupportedError, match="prefix='model'"):
        ringstow.convert.convert(path, tmp_path / "to", target="ringstow", rename=QKV)
    assert not (tmp_path / "to").exists()
    ringstow.convert.convert(path, tmp_path / "hf", target="hf", prefix="model.", rename=QKV)
    assert ringstow.load(tmp_path / "hf")["qkv.weight"].equal(expected)


@pytest.mark.parametrize("way", ["join", "split"])
def test_the_error_names_the_map_that_fits(way, tmp_path):
    """The advice is Python, and the same load with it fits."""
    state = {name: value for name, value in apart().items() if "down" not in name}
    whole = {name: value for name, value in fused(apart()).items() if "down" not in name}
    stored, here = (state, whole) if way == "join" else (whole, state)
    ringstow.save({"model": stored}, tmp_path / "c")
    into = {"model": zeros(here)}
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(into, tmp_path / "c")
    text = str(caught.value)
    assert text.count("experts.") > 20, text
    advised = text[text.index("rename=") + len("rename=") : text.index(" maps them")]
    rename = eval(advised, {"ringstow": ringstow})
    assert len(rename) == 2
    ringstow.load_into(into, tmp_path / "c", rename=rename)
    assert_same(into["model"], here)


# The checkpoint's shapes, the names of those that are swapped here, and the keys of the advice.
TURNED = {
    "one": ({"w": (2, 3)}, "w", ["w"]),
    "a common ending": (
        {f"h.{n}.{kind}.weight": (2, 3) for n in range(11) for kind in "qk"} | {"n.weight": (4,)},
        "q.weight k.weight",
        ["h.*.q.weight", "h.*.k.weight"],
    ),
    "one name for all": (
        {"a.weight": (2, 4), "b.weight": (3, 4), "a.bias": (4,), "step.n": ()},
        "weight",
        ["weight"],
    ),
    "no dimension in another": (
        {"norm.weight": (4,), "a.weight": (2, 4), "b.weight": (4, 4), "c.weight": (3, 2)},
        "a.weight",
        ["a.weight"],
    ),
    "some numbers": ({"h.0.w": (2, 3), "h.1.w": (2, 3), "h.2.w": (3,)}, "0.w", ["h.0.w"]),
}


@pytest.mark.parametrize("case", TURNED)
def test_the_error_names_the_transpose_that_fits(case, tmp_path):
    """Also the tensors that fit either way, and those whose names contain others'."""
    shapes, ends, keys = TURNED[case]
    state = {name: tensor(*shape) for name, shape in shapes.items()}
    turned = {
        name: value.T if name.endswith(tuple(ends.split())) else value
        for name, value in state.items()
    }
    into = {name: torch.zeros(value.shape) for name, value in turned.items()}
    ringstow.save(state, tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(into, tmp_path / "c")
    text = str(caught.value)
    advised = text.partition("swapped: rename=")[2].partition(" turns these")[0]
    rename = eval(advised, {"ringstow": ringstow})
    assert rename == {key: Transpose(key) for key in keys}
    is_told = "fit either way: see which of these are swapped, too (1): b.weight [4, 4]" in text
    assert is_told == (case == "no dimension in another")
    ringstow.load_into(into, tmp_path / "c", rename=rename)
    assert_same(into, turned)


def test_no_transpose_is_advised_that_turns_others(tmp_path):
    ringstow.save({"w": tensor(2, 3), "b.w": tensor(4)}, tmp_path / "c")
    into = {"w": torch.zeros(3, 2), "b.w": torch.zeros(4)}
    with pytest.raises(ringstow.KeyMismatchError, match="two dimensions are swapped$"):
        ringstow.load_into(into, tmp_path / "c")


@pytest.mark.parametrize("kind", ["ringstow", "hf", "torch"])
def test_a_conversion_maps_and_compares_what_it_wrote(kind, tmp_path):
    state = apart()
    source = write(state, tmp_path / "apart", kind)
    report = ringstow.convert.convert(source, tmp_path / "hf", target="hf", rename=FUSE)
    assert report.verified
    assert_same(
        dict(sorted(ringstow.load(tmp_path / "hf").items())), dict(sorted(fused(state).items()))
    )
    parts = Split(UNFUSE["experts.gate_up_proj"].to, dim=1, sizes="equal")
    qkv = Split(UNFUSE["attn.qkv"].to, sizes=(8, 2, 4))
    rename = {**UNFUSE, "experts.gate_up_proj": parts, "attn.qkv": qkv}
    ringstow.convert.convert(tmp_path / "hf", tmp_path / "back", rename=rename)
    back = ringstow.load(tmp_path / "back")
    assert_same({name: back[name] for name in state}, state)


def test_a_sparse_tensor_gets_another_name_and_is_not_turned(tmp_path):
    sparse = torch.eye(2).to_sparse()
    ringstow.save({"model": {"s": sparse}}, tmp_path / "c")
    back = ringstow.load(tmp_path / "c", rename={"model.s": "t"})
    assert torch.equal(back["t"].to_dense(), torch.eye(2))
    with pytest.raises(ringstow.KeyMismatchError, match=r"model\.s, which is made of several"):
        ringstow.load(tmp_path / "c", rename={"model.s": Transpose("t")})
