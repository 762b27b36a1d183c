"""Every kind of tensor loads bit for bit by each face, or the save refuses it by name."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import tensor_list
import torch
import torch.distributed as dist
from support import flip, manifest_of, python, reseal
from tensor_list import FACES, KINDS, REFUSED, Forgotten, Scaled, assert_equal, scaled
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

import ringstow
import ringstow.dcp
import ringstow.distributed
from ringstow.convert import convert

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "values.md"
pytestmark = pytest.mark.filterwarnings("ignore")
# The torch of the documentation's table; others may refuse other kinds.
OF_TABLE = torch.__version__.startswith("2.15")


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def forgotten():
    """Let no type be allowed by the program, after the test, too."""
    from ringstow._state.tensors import _composites

    kept = dict(_composites._allowed)
    _composites._allowed.clear()
    yield
    _composites._allowed.update(kept)


@pytest.mark.parametrize("face", FACES)
def test_all_kinds_come_back_bit_for_bit(face, tmp_path):
    tensor_list.check(face, KINDS, tmp_path / "c")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name(name, tmp_path):
    make, remedy = REFUSED[name]
    for face in FACES:
        error = tensor_list.error_of(face, make, tmp_path / "c")
        assert error is not None, face
        if face.startswith("DCP"):  # some are refused by torch's own planner
            continue
        assert isinstance(error, ringstow.Error)
        assert "model['x']" in str(error)
        assert remedy in str(error)
        assert not (tmp_path / "c").exists()


def test_the_documentation_has_this_table():
    groups = {}
    for name in KINDS:
        family = next((one for one in ("sparse", "jagged", "wrapper") if one in name), None)
        family = family or ("dtype" if hasattr(torch, name) else "view")
        groups.setdefault(family, []).append(name)
    rows = ["| PyTorch's tensors | all calls of ringstow, and DCP |", "|---|---|"]
    rows += [f"| {'; '.join(names)} | bit-equal |" for names in groups.values()]
    rows.append(f"| {'; '.join(REFUSED)} | refused |")
    if OF_TABLE:
        assert "\n".join(rows) in DOCS.read_text(), "\n" + "\n".join(rows)


# In place.


def test_wrappers_are_filled_in_place(tmp_path):
    ringstow.save({"w": scaled(3), "list": [scaled(5)]}, tmp_path / "c")
    state = {"w": scaled(0), "list": [scaled(0)]}
    addresses = [
        t.data_ptr() for one in (state["w"], *state["list"]) for t in (one.codes, one.scale)
    ]
    versions = [one._version for one in (state["w"].codes, state["w"].scale)]
    ringstow.load_into(state, tmp_path / "c")
    assert_equal(state["w"], scaled(3))
    assert_equal(state["list"][0], scaled(5))
    now = [t.data_ptr() for one in (state["w"], *state["list"]) for t in (one.codes, one.scale)]
    assert now == addresses
    assert [one._version for one in (state["w"].codes, state["w"].scale)] > versions


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (lambda: torch.ones(4, 6), "w is a tensor of torch.float32 here and a tensor_list.Scaled"),
        (
            lambda: TwoTensor(torch.ones(1), torch.ones(1)),
            "TwoTensor here and a tensor_list.Scaled",
        ),
        (lambda: 5, r"w is a value \(int\) here and a tensor_list.Scaled"),
        (lambda: Scaled(scaled().codes, scaled().scale, bits=4), r"'bits': 4.* here and context"),
        (
            lambda: Scaled(torch.ones(3, 6).char(), torch.ones(3, 1)),
            r"shape \[3, 6\] here and shape",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(here, said, tmp_path):
    ringstow.save({"w": scaled(), "b": torch.ones(2)}, tmp_path / "c")
    state = {"w": here(), "b": torch.zeros(2)}
    with pytest.raises(ringstow.KeyMismatchError, match=said):
        ringstow.load_into(state, tmp_path / "c")
    assert state["b"].tolist() == [0, 0]


def test_plain_tensor_does_not_fill_a_wrapper(tmp_path):
    ringstow.save({"w": torch.ones(4, 6)}, tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError, match="w is a tensor_list.Scaled, which can't"):
        ringstow.load_into({"w": scaled()}, tmp_path / "c")


MATRIX = torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0], [0, 0, 0, 0], [0, 5, 0, 4]])


def jagged(*lengths):
    rows = [torch.full((length, 2), float(length)) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def twice():
    return torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 4), check_invariants=True)


def buffer_of(tensor):
    module = torch.nn.Module()
    module.register_buffer("table", tensor)
    return module


@pytest.mark.parametrize("face", ["object", "state_dict", "part of a state"])
@pytest.mark.parametrize(
    ("make", "here", "there"),
    [
        (torch.Tensor.to_sparse, -MATRIX, MATRIX),
        (torch.Tensor.to_sparse_csr, torch.zeros(4, 4), MATRIX),
        (torch.Tensor.to_sparse_csc, MATRIX, torch.eye(4)),
        (lambda dense: dense.to_sparse_bsr((2, 2)), torch.zeros(4, 4), MATRIX),
        (lambda dense: dense.to_sparse_bsc((2, 1)), torch.eye(4), MATRIX),
        (lambda lengths: jagged(*lengths) * len(lengths), (2, 3), (2, 3)),
        (lambda lengths: jagged(*lengths) * 0 + 7, (2, 0), (2, 0)),
    ],
)
def test_sparse_and_jagged_tensors_are_filled_for_all_who_hold_them(
    face, make, here, there, tmp_path
):
    saved, module = make(there), buffer_of(make(here))
    ringstow.save(
        {"table": saved} if face == "state_dict" else {"m": {"table": saved}}, tmp_path / "c"
    )
    state = module.state_dict()
    given = {"object": {"m": module}, "state_dict": state, "part of a state": {"m": state}}
    ringstow.load_into(given[face], tmp_path / "c")
    assert_equal(module.table, saved)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (
            torch.zeros(4, 4).to_sparse(),
            MATRIX.to_sparse(),
            r"values \[0\].*\[5\].*\"model\": model",
        ),
        (torch.diag(MATRIX[0]).to_sparse(), twice(), r"a coalesced .*\"model\": model"),
        (
            jagged(2, 3),
            jagged(3, 2),
            r"lengths \[2, 3\] here and one of \[3, 2\] in .*ringstow.load",
        ),
        (
            torch.sparse_coo_tensor(MATRIX.to_sparse().indices(), torch.ones(1).expand(5), (4, 4)),
            MATRIX.to_sparse(),
            "a sparse_coo tensor of an expanded view here",
        ),
        (jagged(2, 3), jagged(2, 4), r"lengths \[2, 3\] here and one of \[2, 4\]"),
        (jagged(2, 3), jagged(2, 3, 1), r"lengths \[2, 3\] here and one of \[2, 3, 1\]"),
        (MATRIX.to_sparse_bsr((2, 2)), MATRIX.to_sparse_bsr((1, 1)), r"values \[4, 2, 2\] here"),
    ],
)
def test_what_cannot_be_filled_in_place_is_refused_and_nothing_changes(here, there, said, tmp_path):
    ringstow.save({"table": there, "b": torch.ones(2)}, tmp_path / "c")
    state = {**buffer_of(here).state_dict(), "b": torch.zeros(2)}
    before = here.clone()
    with pytest.raises(ringstow.KeyMismatchError, match=f"table is .*{said}"):
        ringstow.load_into(state, tmp_path / "c")
    assert state["b"].tolist() == [0, 0]
    assert_equal(here.clone(), before)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_tensors_that_share_indices_here_must_share_them_in_the_checkpoint(layout, tmp_path):
    one, other = MATRIX.to_sparse(layout=layout), MATRIX.T.contiguous().to_sparse(layout=layout)

    def pair():
        """Two tensors with one tensor for their indices."""
        if layout is torch.sparse_coo:
            indices = torch.zeros(2, 5, dtype=torch.long)
            both = [torch.sparse_coo_tensor(indices, torch.zeros(5), (4, 4)) for _ in "ab"]
        else:
            crow, col = torch.tensor([0, 2, 4, 5, 5]), torch.tensor([0, 1, 0, 1, 0])
            both = [torch.sparse_csr_tensor(crow, col, torch.zeros(5), (4, 4)) for _ in "ab"]
        return dict(zip("ab", both, strict=True))

    ringstow.save({"a": one, "b": one * 2}, tmp_path / "c")
    state = pair()
    ringstow.load_into(state, tmp_path / "c")
    assert state["b"].to_dense().equal(MATRIX * 2)
    ringstow.save({"a": one, "b": other}, tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError, match="a and b share memory here and differ"):
        ringstow.load_into(pair(), tmp_path / "c")


def test_an_object_takes_a_sparse_tensor_of_any_number_of_elements(tmp_path):
    for there in (MATRIX.to_sparse(), twice()):
        ringstow.save({"m": buffer_of(there)}, tmp_path / "c")
        module = buffer_of(torch.eye(4).to_sparse())
        ringstow.load_into({"m": module}, tmp_path / "c")
        assert_equal(module.table, there)


def test_snapshot_has_the_inner_values_of_the_call(tmp_path):
    one = scaled(3)
    handle = ringstow.save_async({"w": one}, tmp_path / "c", staging="snapshot")
    one.codes.zero_()
    handle.result()
    assert_equal(ringstow.load(tmp_path / "c")["w"], scaled(3))


def test_names_of_a_tensor_and_of_its_inner_tensors_select_it(tmp_path):
    state = {"a": {"w": scaled(), "b": torch.ones(2)}, "c": 1}
    ringstow.save(state, tmp_path / "c")
    for options in ({"keys": ["a.w"]}, {"keys": ["a.w.codes"]}, {"prefix": "a.w"}):
        found = ringstow.load(tmp_path / "c", **options)
        assert [*found["a"]] == ["w"]
        assert_equal(found["a"]["w"], scaled())
    into = {"x": {"w": scaled(0), "b": torch.zeros(2)}, "c": 0}
    ringstow.load_into(into, tmp_path / "c", rename={"a": "x"})
    assert_equal(into["x"]["w"], scaled())
    into = {"w": scaled(0), "b": torch.zeros(2)}
    ringstow.load_into(into, tmp_path / "c", prefix="a")
    assert_equal(into["w"], scaled())


def test_shared_inner_tensors_are_stored_once_and_shared_again(tmp_path):
    one = scaled(3)
    ringstow.save({"a": one, "b": Scaled(one.codes, torch.ones(4, 1)), "c": one}, tmp_path / "c")
    found = ringstow.load(tmp_path / "c")
    assert len(manifest_of(tmp_path / "c")["tensors"]) == 3
    assert found["a"].codes.data_ptr() == found["b"].codes.data_ptr() == found["c"].codes.data_ptr()


def test_jagged_tensors_of_one_structure_can_be_added_after_a_load(tmp_path):
    one = KINDS["jagged"]()
    ringstow.save({"a": one, "b": one * 2}, tmp_path / "c")
    found = ringstow.load(tmp_path / "c")
    assert (found["a"] + found["b"]).values().equal((one * 3).values())


# What is not allowed, or missing.


def test_type_that_a_load_does_not_allow_is_offered_as_its_parts(forgotten, tmp_path):
    ringstow.allow_types(Scaled)
    ringstow.save({"m": {"w": scaled()}, "n": 1}, tmp_path / "c")
    from ringstow._state.tensors import _composites

    _composites._allowed.clear()
    with pytest.raises(ringstow.UnsupportedError) as caught:
        ringstow.load(tmp_path / "c")
    for part in ("m['w']", "tensor_list.Scaled", "allow_types(Scaled)", "tensor_parts=True"):
        assert part in str(caught.value)
    found = ringstow.load(tmp_path / "c", tensor_parts=True)
    parts = found["m"]["w"]
    assert (parts.type, [*parts.tensors], found["n"]) == (
        "tensor_list:Scaled",
        ["codes", "scale"],
        1,
    )
    assert parts.tensors["codes"].equal(scaled().codes)
    assert parts.context["context"] == {"bits": 8, "dtype": torch.float32, "at": (1, None)}
    ringstow.save(found, tmp_path / "again")  # as what it was
    ringstow.allow_types(Scaled)
    assert_equal(ringstow.load(tmp_path / "again")["m"]["w"], scaled())


def test_inner_tensors_load_where_the_library_is_missing(tmp_path):
    ringstow.save({"w": scaled(), "s": KINDS["sparse COO"]()}, tmp_path / "c")
    code = """
import sys, ringstow
loaded = ringstow.load(sys.argv[1], framework="numpy")
assert loaded["w"].tensors["codes"].tolist() == [[3] * 6] * 4
assert loaded["w"].type == "tensor_list:Scaled" and "torch" not in sys.modules
with ringstow.open(sys.argv[1], framework="numpy") as checkpoint:
    assert [*checkpoint] == ["w.codes", "w.scale", "s.indices", "s.values"]
    assert checkpoint["w.codes"][1].tolist() == [3] * 6
    entry = checkpoint.tree["w"]
    assert (entry.kind, entry.nbytes) == ("composite", 40)
    assert entry.load().tensors["scale"].shape == (4, 1)
"""
    python(code, tmp_path / "c")


def test_a_load_imports_no_module_that_the_checkpoint_names(tmp_path):
    ringstow.save({"w": scaled()}, tmp_path / "c")
    manifest = manifest_of(tmp_path / "c")
    for name, said in (
        ("this:s", "not allowed"),
        ("os:system", "not allowed"),
        ("torch_evil:T", "not allowed"),
        ("torch.nowhere:T", "no such tensor type"),
        ("torch:load", "no such tensor type"),
        ("torch.distributed.tensor:DTensor", "no such tensor type"),
        ("torch.utils.bottleneck.__main__:T", "no such tensor type"),
    ):
        manifest["state"]["w"]["$composite"] = name
        reseal(tmp_path / "c", manifest)
        with pytest.raises(ringstow.UnsupportedError, match=said):
            ringstow.load(tmp_path / "c")
        assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("sparse COO", {"shape": [1, 1]}, "makes? no tensor"),
        ("sparse COO", {"coalesced": None}, "no parts"),
        ("sparse COO", {"more": 1}, "no parts"),
        ("sparse CSR", {"shape": [4, 2]}, "makes? no tensor"),
        ("jagged", {"dim": 9}, "ragged dimension"),
        ("jagged", {"dim": 2}, "outside its values"),
        ("uint4", {"dtype": "text"}, "makes? no tensor"),
        ("wrapper", {"shape": "text"}, "no shape"),
    ],
)
def test_context_that_was_tampered_with_is_refused(kind, change, said, tmp_path):
    ringstow.save({"w": KINDS[kind]()}, tmp_path / "c")
    manifest = manifest_of(tmp_path / "c")
    manifest["state"]["w"]["context"].update(change)
    reseal(tmp_path / "c", manifest)
    with pytest.raises(ringstow.FormatError, match=said) as caught:
        ringstow.load(tmp_path / "c")
    assert "manifest.json: w" in str(caught.value)


def test_type_that_refuses_the_saved_parts_is_named(tmp_path):
    ringstow.save({"w": scaled()}, tmp_path / "c")
    manifest = manifest_of(tmp_path / "c")
    manifest["state"]["w"]["context"]["context"] = {}
    reseal(tmp_path / "c", manifest)
    with pytest.raises(ringstow.UnsupportedError, match=r"tensor_list\.Scaled.*KeyError.*parts"):
        ringstow.load(tmp_path / "c")


def test_only_tensor_types_with_the_protocol_are_allowed():
    for wrong in (int, torch.Tensor, "module:Name"):
        with pytest.raises(TypeError, match="__tensor_flatten__"):
            ringstow.allow_types(wrong)

    class Local(Forgotten):
        pass

    with pytest.raises(ringstow.InvalidStateError, match="top level"):
        ringstow.allow_types(Local)


def test_type_that_a_load_would_not_find_is_refused_by_the_save(tmp_path, monkeypatch):
    one = scaled()
    monkeypatch.setattr(tensor_list, "Scaled", Forgotten)  # the name leads to another type
    with pytest.raises(ringstow.UnsupportedError, match=r"w is a tensor_list\.Scaled.*not find"):
        ringstow.save({"w": one}, tmp_path / "c")


def test_a_damaged_inner_tensor_leaves_the_others(tmp_path):
    ringstow.save({"w": scaled(), "b": torch.ones(1 << 19)}, tmp_path / "c", droppable=["b"])
    entry = next(t for t in manifest_of(tmp_path / "c")["tensors"] if t["name"] == "w.codes")
    (chunk,) = entry["chunks"]
    name = manifest_of(tmp_path / "c")["files"][chunk["file"]]["name"]
    flip(tmp_path / "c" / name, chunk["begin"])
    found = ringstow.load(tmp_path / "c", on_corrupt="skip")
    assert {one.name for one in found.damaged} >= {"w.codes"}
    assert isinstance(found["w"].tensors["codes"], ringstow.DamagedTensor)
    assert found["b"].eq(1).all()


@pytest.mark.parametrize("verify", [True, "background", False])
@pytest.mark.parametrize(
    ("kind", "inner"),
    [("sparse COO", "indices"), ("sparse CSR", "plain_indices"), ("jagged", "offsets")],
)
def test_damaged_indices_are_damage_in_a_mapped_load_too(kind, inner, verify, tmp_path):
    ringstow.save({"w": KINDS[kind]()}, tmp_path / "c")
    entry = next(t for t in manifest_of(tmp_path / "c")["tensors"] if t["name"] == f"w.{inner}")
    (chunk,) = entry["chunks"]
    file = manifest_of(tmp_path / "c")["files"][chunk["file"]]["name"]
    flip(tmp_path / "c" / file, chunk["begin"] + 14)  # the second index becomes huge
    expected = ringstow.CorruptCheckpointError if verify else ringstow.FormatError
    with pytest.raises(expected, match=r"damaged at|w is no") as caught:
        ringstow.load(tmp_path / "c", mmap=True, verify=verify)
    assert type(caught.value) is expected


def test_names_with_any_character_are_kept(tmp_path):
    names = ["", ".", "a.b", "$w", "é\n", '"', "\\", "__metadata__", "w#2", " ", "x" * 5000, "💾"]
    state = {name: {name: scaled(number)} for number, name in enumerate(names)}
    ringstow.save(state, tmp_path / "c")
    found = ringstow.load(tmp_path / "c")
    for number, name in enumerate(names):
        assert_equal(found[name][name], scaled(number))


def test_a_state_without_such_tensors_is_what_it_was(tmp_path):
    ringstow.save({"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))}, tmp_path / "c")
    text = json.dumps(manifest_of(tmp_path / "c")["state"], separators=(",", ":"))
    assert text == '{"w":{"$tensor":"w"},"p":{"$tensor":"p"}}'


# Objects, conversions and comparisons.


class Holder(torch.nn.Module):
    """A module with a wrapper for a parameter, and a sparse buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(TwoTensor(torch.full((3,), value), torch.ones(3) * value))
        self.register_buffer("table", (torch.eye(3) * value).to_sparse())


def test_modules_load_whatever_wraps_them(tmp_path):
    ringstow.save({"m": Holder(2.0)}, tmp_path / "c")
    compiled = torch.compile(Holder(0.0))
    wrapped = checkpoint_wrapper(Holder(0.0))
    for module in (Holder(0.0), compiled, wrapped):
        ringstow.load_into({"m": module}, tmp_path / "c")
        (weight,) = module.parameters()
        (table,) = module.buffers()
        assert weight.a.tolist() == weight.b.tolist() == [2, 2, 2]
        assert table.to_dense().equal(torch.eye(3) * 2)
        ringstow.save({"m": module}, tmp_path / "again")
        assert not ringstow.diff(tmp_path / "c", tmp_path / "again").differing


class Loader:
    """An object with a state of its own."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "list": [self.value]}

    def load_state_dict(self, state):
        self.value = state["list"][0]


@pytest.mark.parametrize("name", ["sparse COO", "sparse CSR", "jagged", "wrapper", "uint4"])
def test_objects_with_such_tensors_get_them_back(name, tmp_path):
    one, other = Loader(KINDS[name]()), Loader(None)
    ringstow.distributed.save({"loader": one}, tmp_path / "c")
    ringstow.distributed.load_into({"loader": other}, tmp_path / "c")
    assert_equal(other.value, one.value)


def test_conversions_to_other_formats_name_the_tensor(tmp_path):
    ringstow.save({"a": {"w": scaled()}, "b": torch.ones(2)}, tmp_path / "c")
    for kind in ("dcp", "torch", "hf"):
        said = rf"a\['w'\] is a tensor_list.Scaled.*'{kind}'.*dequantize=True"
        with pytest.raises(ringstow.UnsupportedError, match=said):
            convert(tmp_path / "c", tmp_path / "out", target=kind)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ringstow.UnsupportedError, match=r"w is a tensor_list.Scaled.*dequantize"):
        ringstow.dcp.export_hf({"w": scaled()}, tmp_path / "out")


def test_sparse_tensors_of_a_torch_file_are_converted(tmp_path):
    state = {"s": KINDS["sparse COO"](), "r": KINDS["sparse CSR"](), "w": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", tmp_path / "c").verified
    found = ringstow.load(tmp_path / "c")
    for name, one in state.items():
        assert_equal(found[name], one)


def test_differences_of_what_makes_a_tensor_are_reported(tmp_path):
    ringstow.save({"w": scaled(), "n": 1}, tmp_path / "a")
    ringstow.save({"w": Scaled(scaled().codes, scaled().scale, bits=4), "n": 1}, tmp_path / "b")
    found = ringstow.diff(tmp_path / "a", tmp_path / "b")
    assert [one.name for one in found.values] == ["w"]
    assert '"bits":8' in found.values[0].a
    assert '"bits":4' in found.values[0].b
    shown = run([sys.executable, "-m", "ringstow", "show", str(tmp_path / "a")])
    assert "w: tensor_list.Scaled 2 tensors" in shown
    assert "w.codes" in shown


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
