"""With DCP, every value loads equal by default, or the save refuses it."""

from __future__ import annotations

import copy
import io
import json
import pathlib

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from states import blank
from support import assert_same, codec
from test_dcp_ranks import failure
from test_dcp_writer import cause
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from value_list import EQUAL, REFUSED, Config, Point

import ringstow
import ringstow.dcp
from ringstow._state.tree import _build, _packed_values
from ringstow._state.tree._refusals import Refusals
from ringstow.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.torch_seam

# numpy unpickles it in the byte order of this machine.
SWAPPED = {"big-endian array"}
# torch.save fails on it, and DCP uses torch.save.
NOT_PICKLED = {"torch.memory_format"}
# DCP uses torch.save for these, and torch.load(weights_only=True) reads them.
READ_BY_TORCH = {"storage", "set of tensors"}
TAKEN_APART = ("sub-class of dict", "mappingproxy", "Counter of tuples", "defaultdict of a lambda")
NAMES = [name for name in EQUAL if name not in NOT_PICKLED | SWAPPED]


def target_for(state):
    """Return a state with the structure that DCP needs, without the values."""
    flat, paths = flatten_state_dict(state)
    if list(paths.values()) == [("value",), ("w",)] or len(flat) == 2:
        empty = torch.zeros_like(flat["value"]) if torch.is_tensor(flat.get("value")) else None
        if "value" in flat:
            return {"w": torch.zeros(2), "value": empty}
    target = copy.deepcopy(state)
    target["w"].zero_()
    return target


@pytest.mark.parametrize("name", NAMES)
def test_comes_back_equal_and_ringstow_loads_the_same(name, tmp_path):
    state = {"w": torch.ones(2), "value": EQUAL[name]()}
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    target = target_for(state)
    dcp.load(target, checkpoint_id=tmp_path, storage_reader=StorageReader())
    assert_same(target, state)
    assert_same(ringstow.load(tmp_path), codec(state))


@pytest.mark.parametrize("name", [*sorted(set(REFUSED) - READ_BY_TORCH), *NOT_PICKLED])
@pytest.mark.filterwarnings("ignore")
def test_is_refused_with_a_remedy(name, tmp_path):
    make, remedy = REFUSED.get(name) or (EQUAL[name], "")
    if name in TAKEN_APART:
        pytest.skip("DCP takes mappings apart")
    value = make()
    state = {"w": torch.ones(2), "a": [value, 1] if name != "quantized tensor" else value}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=StorageWriter())
    assert remedy in str(cause(caught))
    assert "a" in str(cause(caught))
    assert not (tmp_path / "c" / "manifest.json").exists()


@on_ranks(2)
def test_every_rank_raises_with_all_refused_values(rank, tmp_path):
    state, path = (
        {"w": torch.ones(2), f"rng{rank}": np.random.default_rng(1), "lock": open},
        tmp_path / "c",
    )
    writer = StorageWriter()
    errors = failure(lambda: dcp.save(state, checkpoint_id=path, storage_writer=writer))
    said = "\n".join(map(str, errors.values()))
    for expected in ("rng0", "rng1", "x.bit_generator.state"):
        assert expected in said
    assert not (path / "manifest.json").exists()


@on_ranks(2)
def test_ranks_get_their_values_back(rank, tmp_path):
    names = ["BytesIO", "dataclass of tensors", "numpy get_state()", "Path", "Enum"]
    state = {"w": torch.ones(2), "same": {n: EQUAL[n]() for n in names}}
    state[f"own{rank}"] = Config(lr=float(rank))
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    for broadcast in (None, True):
        target = {"w": torch.zeros(2), "same": dict.fromkeys(names), f"own{rank}": None}
        reader = StorageReader(broadcast=broadcast)
        dcp.load(target, checkpoint_id=tmp_path, storage_reader=reader)
        assert_same(target, state)


class Compressing(DefaultSavePlanner):
    """Serializes objects in its own way."""

    def transform_object(self, write_item, value):
        if isinstance(value, torch.Tensor):
            return value
        return io.BytesIO(b"own" + repr(value).encode())


class Wrapping(DefaultSavePlanner):
    """Pickles a value that differs from the state's."""

    def transform_object(self, write_item, value):
        if isinstance(value, torch.Tensor):
            return value
        return super().transform_object(write_item, pathlib.Path(value))


def test_value_transformed_by_a_planner_is_saved(tmp_path):
    writer = StorageWriter(tmp_path / "c")
    dcp.save({"a": "x"}, storage_writer=writer, planner=Wrapping())
    target = {"a": None}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "c"))
    assert target == {"a": pathlib.Path("x")}


def test_bytes_of_a_planner_need_allow_pickle(tmp_path):
    writer = StorageWriter(tmp_path / "c")
    with pytest.raises(
        CheckpointException, match="torch.load can't read the planner.*allow_pickle"
    ):
        dcp.save({"a": "x"}, storage_writer=writer, planner=Compressing())
    writer = StorageWriter(tmp_path / "c", allow_pickle=True)
    dcp.save({"a": "x"}, storage_writer=writer, planner=Compressing())


def test_objects_are_read_before_tensors(tmp_path):
    """A missing type raises before any tensor changes."""
    code = """
import sys, torch, torch.distributed.checkpoint as dcp, ringstow, ringstow.dcp
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "save":
    import late
    state = {"w": torch.ones(3), "a": late.A(1)}
    dcp.save(state, checkpoint_id=sys.argv[1] + "/c", storage_writer=ringstow.dcp.StorageWriter())
else:
    state = {"w": torch.zeros(3), "a": None}
    try:
        dcp.load(
            state, checkpoint_id=sys.argv[1] + "/c", storage_reader=ringstow.dcp.StorageReader()
        )
    except dcp.api.CheckpointException as error:
        assert "import late first" in str(error), error
    assert state["w"].sum() == 0 and "late" not in sys.modules
    try:
        ringstow.load(sys.argv[1] + "/c")
    except ringstow.UnsupportedError as error:
        assert "import late first" in str(error), error
    import late
    dcp.load(state, checkpoint_id=sys.argv[1] + "/c", storage_reader=ringstow.dcp.StorageReader())
    assert state["w"].sum() == 3 and state["a"] == late.A(1)
"""
    (tmp_path / "late.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass A: x: int")
    for step in ("save", "load"):
        ran = forked.python(code, tmp_path, step)
        assert ran.returncode == 0, ran.stderr


def test_a_default_device_without_memory_is_not_used(tmp_path):
    """Read buffers are on the CPU, regardless of torch's default device."""
    code = """
import sys, torch, torch.distributed.checkpoint as dcp, ringstow, ringstow.dcp
path = sys.argv[1]
state = {"a": torch.ones(1000), "e": torch.empty(0), "half": torch.ones(8), "s": [1]}
dcp.save(state, checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter())
target = {
    "a": torch.zeros(1000, dtype=torch.float64),
    "e": torch.ones(0),
    "half": torch.zeros(8, dtype=torch.bfloat16),
    "s": None,
}
torch.set_default_device("meta")
dcp.load(target, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())
assert target["a"].sum() == 1000 and target["half"].sum() == 8 and target["s"] == [1]
assert ringstow.load(path)["e"].device.type == "cpu"
writer = ringstow.dcp.StorageWriter()
staged = writer.stage(state)
assert staged["a"].device.type == staged["e"].device.type == "cpu"
writer.close()
dcp.save(state, checkpoint_id=path + "-b", storage_writer=ringstow.dcp.StorageWriter())
ringstow.save(state, path + "-c")
into = dict(state, a=torch.zeros(1000, device="cpu"))
ringstow.load_into(into, path + "-c")
assert into["a"].sum() == 1000
dcp.save(state, checkpoint_id=path + "-d")
ringstow.convert.convert(path + "-d", path + "-e", target="ringstow")
assert ringstow.load(path + "-e")["a"].sum() == 1000
"""
    ran = forked.python("import ringstow.convert\n" + code, tmp_path / "c")
    assert ran.returncode == 0, ran.stderr


# The bytes of a packed object.


def packed(value):
    return _packed_values.pack("a", value, Refusals())


@pytest.mark.parametrize("name", EQUAL)
def test_packs_and_unpacks(name):
    value = EQUAL[name]()
    assert_same(_build.unpack(packed(value), "/c", "a"), codec({"a": value})["a"])


def test_packed_objects_differ_from_torch_files():
    stream = io.BytesIO()
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        stream = io.BytesIO()
        torch.save({"a": torch.ones(3)}, stream, **options)
        assert not _packed_values.is_packed(stream.getvalue())
    assert not _packed_values.is_packed(b"")
    assert _packed_values.is_packed(packed(None))


def test_strided_and_shared_tensors_are_packed():
    base = torch.arange(12.0).view(3, 4)
    value = Point(base.t(), [base[:, ::2], np.arange(6)[::-2], base.t(), torch.ones(2).conj()])
    assert_same(_build.unpack(packed(value), "/c", "a"), codec({"a": value})["a"])


def changed(change):
    """Return packed bytes with a changed header."""
    data = packed(Point(torch.ones(2), torch.ones(3)))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[start:]


HOSTILE = {
    "no state": lambda h: h.pop("__metadata__"),
    "state is no text": lambda h: h["__metadata__"].update(state=1),
    "tree is none": lambda h: h["__metadata__"].update(state="[1]"),
    "no value": lambda h: h["__metadata__"].update(state="{}"),
    "two values": lambda h: h["__metadata__"].update(state='{"a":1,"b":2}'),
    "larger shape": lambda h: h["a.x"].update(shape=[1 << 40]),
    "negative shape": lambda h: h["a.x"].update(shape=[-2, -1]),
    "other dtype": lambda h: h["a.x"].update(dtype="F64"),
    "unknown dtype": lambda h: h["a.x"].update(dtype="X1"),
    "beyond the end": lambda h: h["a.x"].update(data_offsets=[1000, 1008]),
    "backwards": lambda h: h["a.x"].update(data_offsets=[8, 0]),
    "no offsets": lambda h: h["a.x"].pop("data_offsets"),
    "no entry": lambda h: h.update({"a.x": 5}),
    "a tensor that is not there": lambda h: h.pop("a.y"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_bytes_that_were_never_packed_are_a_format_error(how):
    with pytest.raises(ringstow.FormatError, match="^/c") as caught:
        _build.unpack(changed(HOSTILE[how]), "/c", "a")
    assert caught.value.path


def test_damaged_packed_object_fails_the_load(tmp_path, monkeypatch):
    hostile = changed(HOSTILE["larger shape"])
    monkeypatch.setattr(_packed_values, "pack", lambda *args: hostile)
    state = {"w": torch.ones(2), "a": pathlib.Path("x")}
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=StorageWriter())
    target = blank({"w": torch.ones(2)}) | {"a": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, checkpoint_id=tmp_path, storage_reader=StorageReader())
    assert type(cause(caught)) is ringstow.FormatError
    with pytest.raises(ringstow.FormatError):
        ringstow.load(tmp_path)


def test_dcp_load_runs_no_method_of_the_programs_types(tmp_path):
    code = """
import dataclasses, os, sys, torch, ringstow
import torch.distributed.checkpoint as dcp
from ringstow.dcp import StorageReader
@dataclasses.dataclass
class Conf:
    name: str = ''
    def __reduce__(self): return os.getenv, (self.name,)
ringstow.save({'conf': Conf('HOME'), 't': torch.zeros(2)}, sys.argv[1])
state = {'conf': None, 't': torch.ones(2)}
dcp.load(state, checkpoint_id=sys.argv[1], storage_reader=StorageReader(), no_dist=True)
assert state['conf'] == Conf('HOME'), state
"""
    ran = forked.python(code, tmp_path / "c")
    assert ran.returncode == 0, ran.stderr
