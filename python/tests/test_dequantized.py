"""Exports write quantized tensors dense with dequantize=True; without it they refuse them."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
from safetensors.torch import load_file
from tensor_list import KINDS, Scaled, assert_equal, scaled

import ringstow
import ringstow.dcp
from ringstow._state.tensors import _dequantize
from ringstow._state.tensors._dequantize import Dense
from ringstow._state.tensors._layouts import TensorParts
from ringstow.convert import _cli, convert
from ringstow.dcp._export_dequantized import LastMade

pytestmark = pytest.mark.filterwarnings("ignore")
MADE = []
VALUES = '"quant_type": "nf4", "blocksize": 8, "dtype": "float32", "shape": [4, 4]'


@ringstow.allow_types
class Coded(Scaled):
    """A quantized tensor that can be dequantized."""

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Coded(inner["codes"], inner["scale"], context["bits"])

    def dequantize(self):
        made = self.codes * self.scale
        MADE.append(weakref.ref(made))
        return made


def coded(rows=4, value=3):
    """Return a quantized tensor, and what it stands for."""
    codes = torch.arange(rows * 6, dtype=torch.int8).reshape(rows, 6)
    scale = torch.full((rows, 1), value / 2)
    return Coded(codes, scale), codes * scale


def by_convert(state, path, **options):
    ringstow.save(state, f"{path}-0")
    return convert(f"{path}-0", path, target="hf", **options)


FACES = {"convert": by_convert, "export_hf": ringstow.dcp.export_hf}


@pytest.mark.parametrize("face", FACES)
def test_asked_for_it_is_dense_and_of_the_dtype_asked_for(face, tmp_path):
    one, wanted = coded()
    state = {"m": {"w": one, "b": torch.ones(2), "tied": one}, "optimizer": {"step": 5}}
    for dtype in (None, "bfloat16"):
        path = tmp_path / f"{dtype}"
        report = FACES[face](state, path, prefix="m.", dequantize=True, dtype=dtype)
        found = load_file(path / "model.safetensors")
        assert sorted(found) == ["b", "w"]
        assert found["w"].equal(wanted.to(found["w"].dtype))
        assert str(found["w"].dtype) == f"torch.{dtype or 'float32'}"
        assert report.tied == (("tied", "w"),)


@pytest.mark.parametrize("face", FACES)
def test_not_asked_for_it_is_refused_and_the_argument_is_named(face, tmp_path):
    for make, said in (
        (lambda: coded()[0], "dequantize=True"),
        (KINDS["sparse COO"], "to_dense"),
        (KINDS["uint4"], "view|uint4"),
    ):
        with pytest.raises(ringstow.UnsupportedError, match=rf"w'?\]?.* .*({said})"):
            FACES[face]({"w": make()}, tmp_path / "c")
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("face", FACES)
def test_a_type_that_has_no_way_is_named(face, tmp_path):
    with pytest.raises(ringstow.UnsupportedError, match=r"w.*tensor_list\.Scaled.*plain tensor"):
        FACES[face]({"w": scaled()}, tmp_path / "c", dequantize=True)


@pytest.mark.parametrize("face", FACES)
def test_a_type_that_returns_something_else_fails_the_export(face, tmp_path, monkeypatch):
    monkeypatch.setattr(Coded, "dequantize", lambda self: self.codes)
    with pytest.raises(ringstow.Error, match=r"w.*float32 \[4, 6\].*torch.int8 \[4, 6\]"):
        FACES[face]({"w": coded()[0]}, tmp_path / "c", dequantize=True)
    assert not list(tmp_path.glob("c/*.safetensors"))


@pytest.mark.parametrize("target", ["torch", "dcp", "ringstow", "hf"])
def test_every_target_and_the_program_write_it_dense(target, tmp_path, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the program sets its own
    one, wanted = coded()
    sparse = KINDS["sparse COO"]()
    state = {"w": one, **({"s": sparse} if target == "ringstow" else {})}
    ringstow.save(state, tmp_path / "c")
    to = tmp_path / ("x.pt" if target == "torch" else "x")
    assert convert(tmp_path / "c", to, target=target, dequantize=True).verified
    found = ringstow.load(to)
    assert found["w"].equal(wanted)
    if target == "ringstow":
        assert_equal(found["s"], sparse)
    paths = [str(tmp_path / name) for name in "cy"]
    assert _cli.main([*paths, "--to", target, "--dequantize", "--quiet"]) == 0
    assert ringstow.load(tmp_path / "y")["w"].equal(wanted)


@pytest.mark.parametrize("face", FACES)
def test_only_a_few_dense_tensors_are_in_memory_at_once(face, tmp_path, monkeypatch):
    alive = []
    dequantize = Coded.dequantize

    def counted(self):
        gc.collect()
        alive.append(sum(one() is not None for one in MADE))
        return dequantize(self)

    MADE.clear()
    monkeypatch.setattr(Coded, "dequantize", counted)
    state = {f"w{number:02}": coded(value=number + 1)[0] for number in range(40)}
    FACES[face](state, tmp_path / "c", dequantize=True)
    assert len(alive) >= 40
    assert max(alive) <= 8, alive


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"quant_type": "nf4"}',
        f"{{{VALUES}}}",
        f'{{{VALUES}, "nested_offset": 0.5}}',
        f'{{{VALUES}, "nested_offset": 0.5, "nested_blocksize": 8, "nested_dtype": "float32"}}',
    ],
)
def test_entries_that_only_look_like_bitsandbytes_are_named(text, face, tmp_path):
    codes = torch.zeros(8, dtype=torch.uint8)
    packed = torch.tensor(list(text.encode()), dtype=torch.uint8)
    state = {"l.weight": codes, "l.weight.quant_state.bitsandbytes__nf4": packed}
    with pytest.raises(ringstow.Error, match=r"l\.weight.* looks like a weight of bitsandbytes"):
        FACES[face](state, tmp_path / "c", dequantize=True)
    FACES[face](state, tmp_path / "as they are")


@pytest.mark.parametrize("face", FACES)
def test_a_dtype_casts_no_scale_and_no_code_of_layers_that_stay_quantized(face, tmp_path):
    stay = ("l.weight", "l.weight.absmax", "l.weight.quant_map")
    state = {name: torch.ones(8) for name in (*stay, "b")}
    state["l.weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*b"{}"], dtype=torch.uint8)
    FACES[face]({"m": state}, tmp_path / "c", prefix="m.", dtype="bfloat16")
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert {name for name, one in found.items() if one.dtype == torch.bfloat16} == {"b"}
    assert {*found} == {*state}


@pytest.mark.parametrize("face", FACES)
def test_wrappers_of_one_memory_that_stand_for_other_values_are_not_tied(face, tmp_path):
    codes = torch.arange(36, dtype=torch.int8).reshape(6, 6)
    scale = torch.ones(1, 1)
    made = {"w": Coded(codes, scale), "t": Coded(codes.t(), scale), "bits": Coded(codes, scale, 4)}
    assert FACES[face](made, tmp_path / "c", dequantize=True).tied == ()
    found = load_file(tmp_path / "c" / "model.safetensors")
    for name, one in made.items():
        assert found[name].equal(one.dequantize()), name


@pytest.mark.parametrize("kind", ["torchao.none:Such", "test_dequantized:Coded"])
def test_a_context_that_this_program_can_not_make_is_refused(kind):
    parts = TensorParts(kind, {"codes": torch.ones(2), "scale": torch.ones(1)}, None)
    with pytest.raises(ringstow.UnsupportedError, match=rf"^w is a {kind.replace(':', '.')}"):
        _dequantize.of_parts(parts, "w")


def test_a_tensor_is_made_on_its_own_gpu(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def entered(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    for name, wanted in (("cpu", 0), ("cuda:1", 1)):
        dense = Dense(torch.float32, (), (), lambda: current[-1], torch.device(name))
        assert LastMade().of(dense) == wanted


def test_an_optimizers_tensors_are_left_out_of_a_model(tmp_path):
    ringstow.save({"model": {"w": torch.ones(2)}, "optimizer": {"m": scaled()}}, tmp_path / "c")
    for dequantize in (False, True):
        to = tmp_path / f"{dequantize}"
        convert(tmp_path / "c", to, target="hf", dequantize=dequantize)
        assert [*load_file(to / "model.safetensors")] == ["model.w"]
