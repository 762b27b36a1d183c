"""What ringstow reads of other programs and of its own values, mutated: a clear error, or a state.

``RINGSTOW_MUTATIONS`` sets the number for each kind of input, ``RINGSTOW_SEED`` the first seed. A
failure names its seed: with ``RINGSTOW_MUTATIONS=1`` it runs alone.
"""

import json
import os
import random
import shutil
import tracemalloc
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import saved
from safetensors.torch import save_file

import ringstow
from ringstow.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what it reads

MUTATIONS = int(os.environ.get("RINGSTOW_MUTATIONS", "40"))
SEED = int(os.environ.get("RINGSTOW_SEED", "1"))

WEIGHT = torch.arange(60.0).reshape(6, 10)
STATE = {
    "model": {"w": WEIGHT, "tied": WEIGHT, "view": WEIGHT.t(), "half": torch.ones(3).half()},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1, "betas": (0.9, 0.95)},
    "step": 7,
    "name": "naïve",
    "list": [1, None, True, b"bytes", {"y": 2.5}],
}

# Python objects of a mutated file: more than this means that a number in it was believed.
PYTHON_BYTES_MAX = 64 << 20


def torch_zip(at):
    return saved(STATE, at / "x.pt")


def torch_old(at):
    torch.save(STATE, at / "x.pt", _use_new_zipfile_serialization=False)
    return at / "x.pt"


def dcp_dir(at):
    dcp.save(STATE, checkpoint_id=at / "dcp", no_dist=True)
    return at / "dcp"


def safetensors_dir(at):
    (at / "hf").mkdir()
    save_file({"a": WEIGHT, "b": torch.ones(2, 2).bfloat16()}, at / "hf/model.safetensors")
    return at / "hf"


def index_dir(at):
    (at / "hf").mkdir()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a": WEIGHT}, at / "hf" / files[0])
    save_file({"b": torch.ones(2)}, at / "hf" / files[1])
    text = json.dumps({"metadata": {}, "weight_map": {"a": files[0], "b": files[1]}})
    (at / "hf/model.safetensors.index.json").write_text(text)
    return at / "hf"


def ringstow_dir(at):
    ringstow.save(STATE, at / "own")
    return at / "own"


def whole_file(path, rng):
    path.write_bytes(mutated(path.read_bytes(), rng))


def pickle_in_zip(path, rng):
    """Mutate the pickle, and write the archive's checksums anew: otherwise these find it first."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            is_it = name.endswith("data.pkl")
            archive.writestr(name, mutated(data, rng) if is_it else data)


def values_of_manifest(path, rng):
    """Mutate the values in a manifest, and write its trailer anew."""
    body = path.read_bytes().rsplit(b',"crc32":"', 1)[0]
    before, state = body.split(b',"state":', 1)
    body = before + b',"state":' + mutated(state, rng)
    path.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))


KINDS = {
    "torch": (torch_zip, ".", whole_file),
    "torch pickle": (torch_zip, ".", pickle_in_zip),
    "torch before 1.6": (torch_old, ".", whole_file),
    "DCP metadata": (dcp_dir, ".metadata", whole_file),
    "DCP file": (dcp_dir, "__0_0.distcp", whole_file),
    "safetensors": (safetensors_dir, "model.safetensors", whole_file),
    "index": (index_dir, "model.safetensors.index.json", whole_file),
    "values": (ringstow_dir, "manifest.json", values_of_manifest),
}

NUMBERS = [b"0", b"-1", b"4294967296", b"9223372036854775807", b"18446744073709551616", b"1e999"]
# Of pickles: opcodes with large arguments, and marks that match nothing.
OPCODES = [
    *(b"(", b"0", b"2", b"u", b"t", b"R", b"b", b".", b"Q", b"J\xff\xff\xff\x7f"),
    b"r\xff\xff\xff\x7f",
]
TAGS = [b"$tensor", b"$dict", b"$int", b"$object", b"$ndarray", b"$scalar", b"$odict", b"$value"]


def mutated(data, rng):
    """Return bytes with a few changes, most of them small."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 1, 4, 8, 64]))
        change = rng.randrange(7)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(data):
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif change == 2:
            del data[at:end]
        elif change == 3:
            data[at:at] = data[at:end]
        elif change == 4:
            data[at:end] = rng.choice(NUMBERS + OPCODES + TAGS)
        elif change == 5:
            other = rng.randrange(len(data) + 1)
            data[at:end] = data[other : other + end - at]
        else:
            data[at:end] = rng.randbytes(end - at)
    return bytes(data)


def read(path, kind, at):
    """Return the state, as ringstow's own loads and conversions read it."""
    if kind != "values":
        convert(path, at / "out", overwrite=True)
        path = at / "out"
    return ringstow.load(path)


def refusal(path, kind, at):
    """Return what reading raises, if anything."""
    try:
        read(path, kind, at)
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_input_is_read_or_refused(at, kind):
    make, name, mutate = KINDS[kind]
    source = make(at)
    kept = at / "kept"
    (shutil.copytree if source.is_dir() else shutil.copy)(source, kept)
    read(source, kind, at)
    refused = 0
    for seed in range(SEED, SEED + MUTATIONS):
        mutate(source / name if source.is_dir() else source, random.Random(f"{kind} {seed}"))
        tracemalloc.start()
        error = refusal(source, kind, at)
        assert not isinstance(error, ringstow.PanickedError), f"RINGSTOW_SEED={seed}: {error!r}"
        expected = error is None or isinstance(error, (ringstow.Error, OSError))
        assert expected, f"RINGSTOW_SEED={seed}: {error!r}"
        assert error is None or str(source) in str(error), f"RINGSTOW_SEED={seed}: {error!r}"
        refused += error is not None
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # Python's pickle takes memory for whatever length a pickle claims, and does not touch it.
        is_pickle = kind.startswith(("torch", "DCP"))
        assert most < PYTHON_BYTES_MAX or is_pickle, f"RINGSTOW_SEED={seed}: {most} bytes"
        if source.is_dir():
            shutil.rmtree(source)
            shutil.copytree(kept, source)
        else:
            shutil.copy(kept, source)
    assert refused > 0 or MUTATIONS < 40


def test_metadata_whose_objects_lack_attributes_is_damaged(at):
    source = dcp_dir(at)
    file = source / ".metadata"
    for name in (b"sizes", b"offsets", b"chunks", b"size"):
        data = file.read_bytes()
        assert name in data
        file.write_bytes(data.replace(name, b"x" * len(name)))
        with pytest.raises(ringstow.Error) as caught:
            convert(source, at / "out")
        assert str(file) in str(caught.value)
        assert not (at / "out").exists()
        file.write_bytes(data)
