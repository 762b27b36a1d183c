"""Inspecting a checkpoint without loading it, and reading parts of its tensors."""

import argparse
import collections
import datetime
import io
import os

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import assert_same, flip, python
from test_load_parts import bytes_read_by

import ringstow
import ringstow.dcp


class Odd:
    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


@pytest.fixture
def state():
    weight = torch.arange(24.0).view(4, 6)
    return {
        "model": collections.OrderedDict(weight=weight, tied=weight, low=weight.bfloat16()),
        "array": np.arange(12, dtype=">i4").reshape(3, 4),
        "opt": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        "size": torch.Size([2]),
        "a.b": 7,
        "step": 1000,
    }


@pytest.fixture
def path(state, tmp_path):
    ringstow.save(state, tmp_path / "c")
    return tmp_path / "c"


NAMES = ["model.weight", "model.tied", "model.low", "array", "opt.state.0.step"]


def test_open_lists_names_and_shapes_without_reading(path):
    with ringstow.open(path) as ckpt:
        assert list(ckpt) == list(ckpt.keys()) == NAMES
        assert len(ckpt) == 5
        assert "model.weight" in ckpt
        assert "step" not in ckpt
        shown = {name: (e.name, e.kind, e.dtype, e.shape, e.nbytes) for name, e in ckpt.items()}
    assert shown["model.tied"] == ("model.tied", "tensor", "float32", (4, 6), 96)
    assert shown["model.low"][2:] == ("bfloat16", (4, 6), 48)
    assert shown["array"] == ("array", "array", "int32", (3, 4), 48)
    assert shown["opt.state.0.step"][3:] == ((), 4)


def test_values_are_available_without_reading(path, state):
    with ringstow.open(path) as ckpt:
        tree = ckpt.tree
        assert tree["step"] == ckpt.value("step") == 1000
        assert ckpt.value("a.b") == 7
        assert tree["size"] == state["size"]
        assert tree["opt"]["groups"] == ckpt.value("opt.groups") == [{"lr": 0.1}]
        assert ckpt.value("opt.groups.0.lr") == 0.1
        assert type(tree["model"]) is collections.OrderedDict
        assert tree["model"]["weight"] is ckpt["model.weight"] is ckpt.value("model.weight")
        tree["opt"]["groups"].clear()
        assert ckpt.value("opt.groups") == [{"lr": 0.1}]


def test_tensor_is_loaded_by_name(path, state):
    with ringstow.open(path) as ckpt:
        for name, tensor in state["model"].items():
            assert_same(ckpt[f"model.{name}"].load(), tensor)
        assert_same(ckpt["array"].load(), state["array"])
        assert_same(list(ckpt["model.weight"]), list(state["model"]["weight"]))  # its rows
        assert_same(np.asarray(ckpt["model.weight"]), state["model"]["weight"].numpy())


def test_manifest_metadata_is_exposed(path):
    with ringstow.open(path) as ckpt:
        info = ckpt.info
    assert (info.path, info.kind, info.version) == (str(path), "ringstow", 1)
    assert (info.tensors, info.tensor_bytes, info.world_size, info.generation) == (4, 196, 1, 0)
    assert sum(size for _, size in info.files) == info.file_bytes
    now = datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(0) <= now - info.created < datetime.timedelta(minutes=5)
    assert (info.part_of, info.stripes) == (None, ())
    assert ringstow.CheckpointInfo is type(info)


INDICES = [
    *(np.s_[1], np.s_[-1], np.s_[1:3], np.s_[:, 2], np.s_[..., 1:4], np.s_[::2], np.s_[::-1]),
    *(np.s_[::-2, 5:1:-3], np.s_[1:1], np.s_[3:1], np.s_[None, 1, :, None], np.s_[2, 3]),
    *(np.s_[...], np.s_[:], np.s_[()], np.s_[None, ...], np.s_[np.int64(2), -4:]),
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("verify", [True, False])
def test_slices_are_those_of_numpy(path, state, index, verify):
    array = state["model"]["weight"].numpy()
    with ringstow.open(path, verify=verify) as ckpt:
        part = ckpt["model.weight"][index]
        assert type(part) is torch.Tensor
        assert part.is_contiguous()
        assert_same(part, torch.tensor(array[index].copy()))
        low = ckpt["model.low"][index]
        assert_same(low, torch.tensor(array[index].copy()).bfloat16())
    with ringstow.open(path, framework="numpy") as ckpt:
        part = ckpt["model.weight"][index]
        assert type(part) is type(array[index])
        assert_same(part, array[index])
    smaller = state["array"]
    if isinstance(index, tuple) and any(item in (3, 2) for item in index if type(item) is int):
        return
    with ringstow.open(path) as ckpt:
        assert_same(ckpt["array"][index], smaller[index])


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (4, IndexError, "index 4 is out of bounds for dimension 0 of model.weight, of size 4"),
        (np.s_[0, -7], IndexError, "dimension 1"),
        (np.s_[0, 0, 0], IndexError, "2 dimensions, and 3 indices"),
        (np.s_[..., 0, ...], IndexError, "'...'"),
        ([0, 1], TypeError, "not list.*load"),
        (np.s_[torch.tensor([True, False, True, True])], TypeError, "not Tensor"),
        (True, TypeError, "not bool"),
        ("weight", TypeError, "not str"),
        (1.0, TypeError, "not float"),
        (np.s_[::0], ValueError, "zero"),
    ],
)
def test_invalid_indices_are_refused(path, index, error, words):
    with ringstow.open(path) as ckpt, pytest.raises(error, match=words):
        ckpt["model.weight"][index]


slices = st.builds(
    slice,
    st.none() | st.integers(-40, 40),
    st.none() | st.integers(-40, 40),
    st.none() | st.integers(-9, 9).filter(bool),
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    # Rows of 4 KiB: a slice with a step over rows skips rows; a step within a row does not.
    tensor = torch.arange(30 * 1024 * 3).view(30, 1024, 3).int()
    path = tmp_path_factory.mktemp("wide") / "c"
    ringstow.save({"w": tensor}, path)
    with ringstow.open(path, verify=False, framework="numpy") as ckpt:
        yield ckpt["w"], tensor.numpy()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(slices | st.integers(-30, 29), slices, slices))
def test_any_slice_is_that_of_numpy(wide, index):
    entry, array = wide
    assert_same(entry[index], array[index])


def test_slice_reads_only_its_bytes(tmp_path):
    ringstow.save({"big": torch.zeros(4096, 1024)}, tmp_path / "c")  # 16 MiB
    with ringstow.open(tmp_path / "c") as ckpt:
        assert bytes_read_by(lambda: ckpt["big"][7]) < 3 << 20
    with ringstow.open(tmp_path / "c", verify=False) as ckpt:
        assert bytes_read_by(lambda: ckpt["big"][::512, 3]) < 1 << 20
        assert bytes_read_by(lambda: ckpt["big"].shape) < 1 << 16


def test_value_with_fields_is_read_without_its_tensors(tmp_path):
    state = {"args": argparse.Namespace(w=torch.zeros(1 << 18), lr=0.1)}
    ringstow.save(state, tmp_path / "c")
    flip(next((tmp_path / "c").glob("*.safetensors")), -1)
    with ringstow.open(tmp_path / "c") as ckpt:
        args = ckpt.value("args")
        assert (args.lr, args.w.shape) == (0.1, (1 << 18,))
        with pytest.raises(ringstow.CorruptCheckpointError):
            args.w.load()


def test_missing_name_is_a_key_error_with_suggestions(path):
    with ringstow.open(path) as ckpt:
        with pytest.raises(KeyError, match=r"perhaps 'model\.weight'") as caught:
            ckpt["model.wieght"]
        assert isinstance(caught.value, ringstow.KeyMismatchError)
        assert ckpt.get("nothing") is None
        with pytest.raises(ringstow.KeyMismatchError, match=r"value\('step'\)"):
            ckpt["step"]
        with pytest.raises(ringstow.KeyMismatchError, match="stepp"):
            ckpt.value("stepp")


def test_use_after_close_raises(path):
    with ringstow.open(path) as ckpt:
        entry = ckpt["model.weight"]
    assert ckpt.closed
    uses = [entry.load, ckpt.__enter__, ckpt.__iter__, ckpt.__len__, lambda: ckpt.tree]
    uses += [lambda: ckpt.info, lambda: ckpt["model.weight"], lambda: ckpt.value("step")]
    for use in (*uses, lambda: entry[0]):
        with pytest.raises(ValueError, match="closed: open it again"):
            use()
    assert "closed" in repr(ckpt)
    ckpt.close()


def test_replaced_checkpoint_is_not_read_instead(path):
    with ringstow.open(path) as ckpt:
        ringstow.save({"model": {"weight": torch.zeros(4, 6)}}, path)
        for read in (ckpt["model.weight"].load, lambda: ckpt["model.weight"][0, 1:3]):
            with pytest.raises(ringstow.ReplacedCheckpointError, match="open it again"):
                read()
        assert ckpt.value("step") == 1000  # from the opened checkpoint


def test_values_are_not_unpickled_by_default(tmp_path):
    ringstow.save({"odd": Odd(), "w": torch.ones(1)}, tmp_path / "c", allow_pickle=True)
    with ringstow.open(tmp_path / "c") as ckpt:
        odd = ckpt.tree["odd"]
        assert (odd.kind, odd.dtype, odd.shape) == ("pickle", "", ())
        assert odd.nbytes > 0
        with pytest.raises(ringstow.UnsupportedError, match="allow_pickle=True"):
            odd.load()
        with pytest.raises(ringstow.UnsupportedError, match="allow_pickle=True"):
            ckpt.value("odd")
        with pytest.raises(TypeError, match="not a tensor"):
            odd[0]
    with ringstow.open(tmp_path / "c", allow_pickle=True) as ckpt:
        assert ckpt.value("odd") == ckpt.tree["odd"].load() == Odd()


def test_open_reads_dcp_checkpoints(tmp_path):
    state = {"model": {"w": torch.arange(10.0)}, "step": 5, "blob": io.BytesIO(b"abc")}
    writer = ringstow.dcp.StorageWriter()
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)
    with ringstow.open(tmp_path / "c") as ckpt:
        assert list(ckpt) == ["model.w"]
        assert ckpt["model.w"][2:4].tolist() == [2, 3]
        assert (ckpt.tree["step"].kind, ckpt.tree["step"].load()) == ("object", 5)
        assert ckpt.value("step") == 5
        assert ckpt.value("blob").getvalue() == b"abc"


def test_unknown_types_do_not_hide_other_values(tmp_path):
    code = """
import dataclasses, sys, ringstow
@dataclasses.dataclass
class Run:
    seed: int
ringstow.save({"run": Run(5), "step": 3}, sys.argv[1])
"""
    python(code, tmp_path / "c", check=True)
    with ringstow.open(tmp_path / "c") as ckpt:
        run = ckpt.tree["run"]
        assert (run.name, run.kind, run.nbytes) == ("run", "value", 0)
        assert ckpt.tree["step"] == 3
        assert ckpt.value("run.seed") == 5
        for read in (run.load, lambda: ckpt.value("run")):
            with pytest.raises(ringstow.UnsupportedError, match="Run"):
                read()


def test_value_of_a_type_that_is_imported_later_loads_with_its_tensors(tmp_path, monkeypatch):
    (tmp_path / "late_type.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Ema:\n    weight: object\n"
    )
    code = """
import sys
sys.path.insert(0, sys.argv[2])
import late_type, ringstow, torch
ringstow.save({"ema": late_type.Ema([torch.ones(3)])}, sys.argv[1])
"""
    python(code, tmp_path / "c", tmp_path, check=True)
    with ringstow.open(tmp_path / "c") as ckpt:
        ema = ckpt.tree["ema"]
        monkeypatch.syspath_prepend(tmp_path)
        import late_type  # noqa: F401

        assert_same(ema.load().weight, [torch.ones(3)])


def test_every_index_of_a_4_bit_tensor_says_what_to_do(tmp_path):
    float4 = getattr(torch, "float4_e2m1fn_x2", None)  # older torch lacks it
    if float4 is None:
        pytest.skip("torch has no 4-bit floats")
    ringstow.save({"a": torch.zeros(2, 4, dtype=torch.uint8).view(float4)}, tmp_path / "c")
    with ringstow.open(tmp_path / "c") as ckpt:
        for index in (..., slice(None), 0):
            with pytest.raises(ringstow.UnsupportedError, match="4-bit"):
                ckpt["a"][index]


def test_plain_safetensors_files_open_too(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    with ringstow.open(tmp_path) as ckpt:
        assert ckpt.info.kind == "safetensors"
        assert set(ckpt) == {"a", "b"}
        assert ckpt.tree == {}
        assert ckpt["a"][1, ::2].tolist() == [3, 5]
        assert_same(ckpt["b"].load(), tensors["b"])
        with pytest.raises(KeyError, match="perhaps 'a'"):
            ckpt["aa"]


def test_numpy_reads_without_torch(path):
    code = """
import sys
sys.modules["torch"] = None
import ringstow
with ringstow.open(sys.argv[1], framework="numpy") as ckpt:
    assert ckpt.value("step") == 1000 and ckpt.tree["size"] == (2,)
    assert ckpt["model.low"].dtype == "bfloat16"
    print(ckpt["model.weight"][1, ::2].tolist(), ckpt["model.tied"].load().sum())
"""
    ran = python(code, path)
    assert ran.stdout == "[6.0, 8.0, 10.0] 276.0\n", ran.stderr


@pytest.mark.parametrize("name", ["gone", "file"])
def test_non_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=name):
        ringstow.open(tmp_path / name)
    os.mkdir(tmp_path / "empty")
    with pytest.raises(ringstow.IncompleteCheckpointError, match="nothing was saved here"):
        ringstow.open(tmp_path / "empty")
    with pytest.raises(ValueError, match="framework"):
        ringstow.open(tmp_path, framework="jax")
