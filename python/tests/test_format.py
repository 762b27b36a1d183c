"""The bytes on disk do not change, and older checkpoints still load.

``tests/format/v1-0.1.0/python`` has small checkpoints that version 0.1.0 wrote, with values that
only the Python package writes; ``tests/format.rs`` covers the rest. The tests save each again and
compare all bytes, except for time and writer (see `settled`). To change the stored files on
purpose, run this file with Python, and explain in the commit why older readers still understand
them.
"""

import collections
import pathlib
import re
import shutil
import tempfile
import zlib

import numpy as np
import pytest
import states
import torch
import torch.distributed.checkpoint as dcp
from support import assert_same, manifest_of
from tensor_list import assert_equal
from torch.testing._internal.two_tensor import TwoTensor
from value_list import EQUAL

import ringstow
import ringstow.dcp
from ringstow.convert import convert

STORED = pathlib.Path(__file__).parents[2] / "tests/format/v1-0.1.0/python"
SMALL = ringstow.Config(block_bytes=4096, pool_bytes=8 * 4096)

# The value depends on torch's version; a set's order differs between processes.
CHANGING = {"torch.__version__", "set", "set of several types"}


def values():
    """Return the stored values of every kind; when storing, return all values."""
    manifest = STORED / "values/manifest.json"
    names = manifest_of(manifest.parent)["state"] if manifest.exists() else EQUAL
    return {name: EQUAL[name]() for name in names if name not in CHANGING}


def arange(dtype, *shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def tensors():
    """Return tensors of torch's and numpy's dtypes, in unusual layouts, and one of them twice."""
    grid = arange(torch.float32, 4, 6)
    tied = arange(torch.float32, 3)
    kinds = (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
    model = collections.OrderedDict({"head.weight": tied, "embed.weight": tied})
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    return {
        "model": model,
        "dtypes": {str(kind): arange(kind, 2, 3) for kind in kinds},
        "layouts": [grid.t(), grid[:, 2:5], torch.arange(3.0).expand(2, 3), torch.tensor(2.5)],
        "empty": torch.empty(0, 3),
        "numpy": [np.arange(6, dtype=">i4"), np.array(1.5)],
    }


def training():
    """Return a typical state for DCP: tensors, and an object that ringstow packs."""
    return {
        "model": {"w": arange(torch.bfloat16, 50, 10), "empty": torch.empty(0)},
        "packed": {"at": pathlib.PurePosixPath("a"), "w": torch.ones(2)},
    }


def composites():
    """Return tensors that are made of others."""
    grid = arange(torch.float32, 4, 6)
    return {
        "coo": (grid * (grid % 3 == 0)).to_sparse(),
        "csr": (grid * (grid % 4 == 0)).to_sparse_csr(),
        "bits": arange(torch.uint8, 2, 3).view(torch.uint4),
        "wrapper": TwoTensor(grid, TwoTensor(grid + 1, grid + 2)),
    }


def objects():
    """Return objects that DCP's planner serializes with ``torch.save``."""
    return {"w": torch.ones(2), "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 7}


def save_dcp(state, path):
    dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(path, config=SMALL))


def load_dcp(state, path):
    """Load with DCP into a state of the same structure and return it."""
    into = states.blank(state)
    dcp.load(into, storage_reader=ringstow.dcp.StorageReader(path))
    return into


def save_hf(state, path):
    with tempfile.TemporaryDirectory() as source:
        ringstow.save(state, source + "/c", config=SMALL)
        convert(source + "/c", path, target="hf", max_shard_size=8000)


CASES = {
    "values": (values, lambda state, path: ringstow.save(state, path, config=SMALL)),
    "tensors": (tensors, lambda state, path: ringstow.save(state, path, config=SMALL, step=5)),
    "composites": (composites, lambda state, path: ringstow.save(state, path, config=SMALL)),
    "dcp": (training, save_dcp),
    "hf": (lambda: training()["model"], save_hf),
}


def settled(path):
    """Return a file's bytes; of a manifest with fixed time, writer, sequence and checksum."""
    data = path.read_bytes()
    if path.name != "manifest.json":
        return data
    text, trailer = data.rsplit(b',"crc32":', 1)
    assert trailer == b'"%08x"}\n' % zlib.crc32(text)
    text = re.sub(rb'"created_unix_ms":[0-9]+', b'"created_unix_ms":0', text, count=1)
    text = re.sub(rb'"writer":"[^"]+"', b'"writer":"0.1.0"', text, count=1)
    text = re.sub(rb'"sequence":[0-9]+', b'"sequence":1', text, count=1)
    return text + b',"crc32":"%08x"}\n' % zlib.crc32(text)


def files_in(path):
    return {file.name: settled(file) for file in sorted(path.iterdir())}


@pytest.mark.parametrize("name", CASES)
def test_save_writes_the_stored_bytes(name, tmp_path):
    make, save = CASES[name]
    save(make(), tmp_path / "c")
    saved, stored = files_in(tmp_path / "c"), files_in(STORED / name)
    assert list(saved) == list(stored)
    for file, data in saved.items():
        assert data == stored[file], f"{name}/{file} differs"


def test_load_returns_tied_tensors_tied():
    model = ringstow.load(STORED / "tensors")["model"]
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()


@pytest.mark.parametrize("name", ["values", "tensors"])
def test_load_returns_the_stored_values(name):
    assert_same(ringstow.load(STORED / name), CASES[name][0]())


def test_load_returns_the_stored_composites():
    found, wanted = ringstow.load(STORED / "composites"), composites()
    for name, one in wanted.items():
        assert_equal(found[name], one)


def test_dcp_loads_the_stored_values():
    assert_same(load_dcp(training(), STORED / "dcp"), training())
    assert_same(load_dcp(objects(), STORED / "dcp-objects"), objects())


def test_convert_reads_the_stored_hf_directory(tmp_path):
    convert(STORED / "hf", tmp_path / "c", source="hf")
    loaded = ringstow.load(tmp_path / "c")
    assert_same(dict(sorted(loaded.items())), dict(sorted(training()["model"].items())))


def store():
    """Write the files that the tests compare with."""
    every = {**CASES, "dcp-objects": (objects, save_dcp)}
    for name, (make, save) in every.items():
        state = make()
        with tempfile.TemporaryDirectory() as root:
            save(state, pathlib.Path(root, "c"))
            files = files_in(pathlib.Path(root, "c"))
        shutil.rmtree(STORED / name, ignore_errors=True)
        (STORED / name).mkdir(parents=True)
        for file, data in files.items():
            (STORED / name / file).write_bytes(data)


if __name__ == "__main__":
    store()
